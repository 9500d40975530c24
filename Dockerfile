# OpenClaw MCP Proxy in a container.
#
#   docker build -t openclaw-mcp-proxy --build-arg OPENCLAW_BUILD_COMMIT="$(git rev-parse HEAD)" .
#   docker run --rm -p 127.0.0.1:8000:8000 --stop-timeout 40 \
#     -e OPENCLAW_PROXY_APP_TOKEN -e OPENCLAW_PROXY_OPENCLAW_TOKEN openclaw-mcp-proxy
#
# Both tokens come from the environment, never from the image; without them it does not start.
# Behind a TLS proxy set OPENCLAW_PROXY_PUBLIC_URL too: it is not on the container's loopback, so what it says in
# X-Forwarded-* is not believed (OPENCLAW_PROXY_TRUSTED_PROXIES). deploy/compose.yaml shows the whole.

FROM rust:1-slim-bookworm AS build
WORKDIR /src
COPY . .
# What --version shows beside the version; there is no repository in here.
ARG OPENCLAW_BUILD_COMMIT=
# Then all programs there are, and nothing else of what cargo leaves beside them.
RUN cargo build --release --locked --bins \
    && find target/release -maxdepth 1 -type f -executable -exec install -D -t /out {} +

# The same Debian as above, so that the C library fits.
FROM debian:bookworm-slim
# For those of the programs that call https themselves.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/ /usr/local/bin/

# A number, so that Kubernetes' runAsNonRoot can check it. Nothing is written, so the root may be read-only.
USER 65532:65532
ENV OPENCLAW_PROXY_LISTEN=0.0.0.0:8000
EXPOSE 8000

# Calls in flight get 25 seconds at SIGTERM: stop with a timeout of 40.
STOPSIGNAL SIGTERM

HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/openclaw-mcp-proxy", "health"]

ENTRYPOINT ["/usr/local/bin/openclaw-mcp-proxy"]
