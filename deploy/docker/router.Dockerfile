# Router and gateway: no engine, no compiler.
#   docker build -f deploy/docker/router.Dockerfile -t tokenbus-router .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
# The packages first, with an empty Tokenbus: this layer stays when only the code changes.
RUN mkdir tokenbus && touch tokenbus/__init__.py && python3 -m venv /opt/tokenbus \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt '.[router,gateway,traces,oidc]'
COPY . .
RUN /opt/tokenbus/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM ${BASE}
COPY --from=build /opt/tokenbus /opt/tokenbus
RUN useradd --system --uid 10001 --no-create-home tokenbus
USER 10001
ENV PATH=/opt/tokenbus/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENBUS_LOG_FORMAT=json
ENTRYPOINT ["tokenbus"]
CMD ["router", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
HEALTHCHECK --interval=5s --timeout=3s --start-period=5s CMD ["tokenbus", "health"]
