//! Every route, grouped by who calls it and which token guards it.

use std::sync::Arc;

use axum::Router;
use axum::routing::{any, get, post, put};
use http::StatusCode;

use crate::proxy::error::ApiError;
use crate::proxy::{ProxyState, api, mcp};

/// The router of the public listener.
pub fn router(state: Arc<ProxyState>) -> Router {
    Router::new()
        // Anybody: load balancers, containers, people.
        .route("/health", get(health))
        // Apps, with the app token.
        .route("/v1/chat/sessions", post(api::create))
        .route("/v1/chat/sessions/{id}", get(api::show).delete(api::delete))
        .route("/v1/chat/sessions/{id}/tools", put(api::put_tools))
        .route("/v1/chat/sessions/{id}/bridge", get(api::bridge))
        // MCP clients, with the OpenClaw token. No redirects between the slash forms: they cost a round trip.
        .route("/v1/mcp", any(mcp::endpoint))
        .route("/v1/mcp/", any(mcp::endpoint))
        .route("/v1/mcp/{id}", any(mcp::endpoint))
        .route("/v1/mcp/{id}/", any(mcp::endpoint))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "There is nothing at this path."))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "This path does not serve this method.")
        })
        .with_state(state)
}

/// The seed's health check: plain `ok`.
async fn health() -> &'static str {
    "ok"
}
