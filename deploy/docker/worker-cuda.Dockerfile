# Worker for NVIDIA GPUs. NOT TESTED: there was no GPU to run it on.
#   docker build -f deploy/docker/worker-cuda.Dockerfile -t tokenbus-worker-cuda .
# CUDA_ARCHITECTURES are those of the GPUs to support: 80 A100, 86 A10, 89 L4 and L40, 90 H100 and H200.
ARG CUDA=12.8.1
ARG BUILD_BASE=nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04
ARG BASE=nvidia/cuda:${CUDA}-cudnn-runtime-ubuntu24.04
FROM ${BUILD_BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG CUDA_ARCHITECTURES="80;86;89;90"
ENV CMAKE_ARGS="-DGGML_CUDA=ON -DGGML_NATIVE=OFF -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" TOKENBUS_CACHE=/cache
COPY deploy/*.py deploy/
RUN python3 -m venv /opt/tokenbus && /opt/tokenbus/bin/python -m deploy.llama_cpp_wheel
COPY pyproject.toml README.md LICENSE constraints.txt ./
# The packages first, with an empty Tokenbus: this layer stays when only the code changes.
RUN mkdir tokenbus && touch tokenbus/__init__.py \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt /cache/tokenbus/wheels/*/*.whl '.[worker,onnx-gpu,traces]'
COPY . .
# pip, setuptools and the packages' own tests take 44 MB that nothing runs.
RUN /opt/tokenbus/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
 && find /opt/tokenbus -type d -name tests -prune -exec rm -r {} + \
 && /opt/tokenbus/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tokenbus /opt/tokenbus
RUN useradd --system --uid 10001 --create-home tokenbus \
 && install -d -o 10001 /home/tokenbus/.cache
USER 10001
ARG VERSION=unknown
LABEL org.opencontainers.image.title="Tokenbus worker for NVIDIA GPUs" \
      org.opencontainers.image.description="An LLM inference worker behind a NATS broker, with llama.cpp and onnxruntime for CUDA" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/tokenbus/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENBUS_LOG_FORMAT=json
VOLUME /models /home/tokenbus/.cache
ENTRYPOINT ["tokenbus"]
CMD ["worker", "--model", "demo", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s CMD ["tokenbus", "health"]
