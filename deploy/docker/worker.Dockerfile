# Worker for CPUs: llama.cpp and onnxruntime.
#   docker build -f deploy/docker/worker.Dockerfile -t tokenbus-worker .
# CMAKE_ARGS are passed to llama.cpp's build; without GGML_NATIVE=OFF the image only runs on processors like the builder's.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake make ninja-build python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
COPY deploy/llama_cpp_wheel.py deploy/
COPY pyproject.toml README.md constraints.txt ./
ENV TOKENBUS_CACHE=/cache
RUN python3 -m venv /opt/tokenbus \
 && wheel=$(/opt/tokenbus/bin/python deploy/llama_cpp_wheel.py 0.3.36) \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt "$wheel"
COPY . .
# onnxruntime without CUDA: a fifth of the size.
RUN sed -i 's/^onnxruntime-gpu==/onnxruntime==/' constraints.txt \
 && sed -i 's/"onnxruntime-gpu>=/"onnxruntime>=/' pyproject.toml \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt '.[traces]'

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tokenbus /opt/tokenbus
RUN useradd --system --uid 10001 --create-home tokenbus
USER 10001
ENV PATH=/opt/tokenbus/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENBUS_LOG_FORMAT=json
VOLUME /models
ENTRYPOINT ["tokenbus"]
CMD ["worker", "--model", "demo", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["tokenbus", "health"]
