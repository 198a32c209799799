# A worker with llama.cpp and onnxruntime, for CPUs unless it is told otherwise:
#   docker build -f deploy/docker/worker.Dockerfile -t tokenbus-worker .
# docs/operations.md has the arguments for NVIDIA, AMD, Intel and other GPUs ("Images for GPUs").
#
# It runs on every x86-64 processor with SSE4.2, which numpy needs. llama.cpp is compiled for all of them, unless a
# release's wheel of it lies in deploy/.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}
FROM ${BUILD_BASE} AS build
ARG BUILD_PACKAGES="g++ make"
RUN apt-get update && apt-get install -y --no-install-recommends ${BUILD_PACKAGES} && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# More options for llama.cpp. GPU code of llama.cpp becomes a library of its own, which is loaded where it can run.
ARG CMAKE_ARGS=""
COPY deploy/*.py deploy/llama_cpp_python-*.whl deploy/
RUN python3 -m venv /opt/tokenbus && mkdir wheels && if ls deploy/*.whl; then mv deploy/*.whl wheels; \
    else cp "$(/opt/tokenbus/bin/python -m deploy.llama_cpp_wheel --portable)" wheels; fi
COPY pyproject.toml README.md LICENSE constraints.txt ./
# The packages first, with an empty Tokenbus: this layer stays when only the code changes.
ARG EXTRAS=worker,worker-onnx,traces
RUN mkdir tokenbus && touch tokenbus/__init__.py \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt wheels/*.whl ".[${EXTRAS}]"
COPY . .
# pip, setuptools and the packages' own tests take 44 MB that nothing runs.
RUN /opt/tokenbus/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
 && find /opt/tokenbus -type d -name tests -prune -exec rm -r {} + \
 && /opt/tokenbus/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
ARG PACKAGES=libgomp1
RUN apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tokenbus /opt/tokenbus
RUN useradd --system --uid 10001 --create-home tokenbus \
 && install -d -o 10001 /home/tokenbus/.cache
USER 10001
ARG VERSION=unknown
LABEL org.opencontainers.image.title="Tokenbus worker" \
      org.opencontainers.image.description="An LLM inference worker behind a NATS broker, with llama.cpp and onnxruntime" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/tokenbus/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENBUS_LOG_FORMAT=json
VOLUME /models /home/tokenbus/.cache
ENTRYPOINT ["tokenbus"]
CMD ["worker", "--model", "demo", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["tokenbus", "health"]
