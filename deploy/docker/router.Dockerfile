# Router and gateway: no engine, no compiler.
#   docker build -f deploy/docker/router.Dockerfile -t tokenbus-router .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
# The packages first, with an empty Tokenbus: this layer stays when only the code changes.
RUN mkdir tokenbus && touch tokenbus/__init__.py && python3 -m venv /opt/tokenbus \
 && /opt/tokenbus/bin/pip install --no-cache-dir -c constraints.txt '.[router,gateway,traces,oidc]'
COPY . .
# pip, setuptools and the packages' own tests take 44 MB that nothing runs.
RUN /opt/tokenbus/bin/pip install --no-cache-dir --no-deps --force-reinstall . \
 && find /opt/tokenbus -type d -name tests -prune -exec rm -r {} + \
 && /opt/tokenbus/bin/pip uninstall --yes --quiet setuptools pip

FROM ${BASE}
COPY --from=build /opt/tokenbus /opt/tokenbus
RUN useradd --system --uid 10001 --no-create-home tokenbus
USER 10001
ARG VERSION=unknown
LABEL org.opencontainers.image.title="Tokenbus router and gateway" \
      org.opencontainers.image.description="Routers, gateways and auth of LLM inference workers behind a NATS broker" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/tokenbus/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENBUS_LOG_FORMAT=json
ENTRYPOINT ["tokenbus"]
CMD ["router", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]
HEALTHCHECK --interval=5s --timeout=3s --start-period=5s CMD ["tokenbus", "health"]
