//! Every route, grouped by who calls it and which token guards it.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use http::{Method, StatusCode};

use crate::proxy::error::ApiError;
use crate::proxy::metrics::{Refused, Side};
use crate::proxy::{ProxyState, Request, admin, api, body, cors};

/// The session that a path of the MCP endpoint names, an empty text if it names none; `None` for other paths.
///
/// MCP clients, with the OpenClaw token, come by here and not by the router: it is the way of every call. There are no
/// redirects between the forms with a slash at the end and without: they cost a round trip.
pub fn mcp_session(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/mcp")?;
    let Some(rest) = rest.strip_prefix('/') else { return rest.is_empty().then_some("") };
    let id = rest.strip_suffix('/').unwrap_or(rest);
    (!id.contains('/')).then_some(id).filter(|id| !id.is_empty() || rest.is_empty())
}

/// The router of the public listener, for all but the MCP endpoint.
pub fn router(state: Arc<ProxyState>) -> Router {
    // Apps, with the app token.
    let apps = Router::new()
        .route("/v1/chat/sessions", post(api::create))
        .route("/v1/chat/sessions/{id}", get(api::show).delete(api::delete))
        .route("/v1/chat/sessions/{id}/tools", put(api::put_tools))
        .route("/v1/chat/sessions/{id}/bridge", get(api::bridge))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "This path does not serve this method.")
        })
        .layer(from_fn_with_state(Arc::clone(&state), gate));
    Router::new()
        .merge(apps)
        // Anybody: load balancers, containers, people.
        .route("/health", get(health))
        .route("/ready", get(admin::ready))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "There is nothing at this path."))
        .with_state(state)
}

/// The seed's health check: plain `ok`.
async fn health() -> &'static str {
    "ok"
}

/// What stands before all of the apps' routes; the MCP endpoint does the same in its own words.
async fn gate(State(state): State<Arc<ProxyState>>, mut request: Request, next: Next) -> Response {
    let ip = state.client_ip(request.extensions(), request.headers());
    let origin = match state.gate.check(request.headers()) {
        Ok(origin) => origin.map(str::to_owned),
        Err(refusal) => {
            state.records.refused(Side::App, ip, refusal.status, Refused::Gate);
            return refuse(&state, request, refusal.into()).await;
        }
    };
    if let Err(refusal) = state.rates.request(ip) {
        state.records.refused(Side::App, ip, refusal.status, Refused::Limit);
        return ApiError::from(refusal).into_response();
    }
    let is_preflight = origin.is_some() && request.method() == Method::OPTIONS;
    // A bridge is closed with a code instead, which its app can read.
    let is_bridge = request.method() == Method::GET && api::is_bridge_path(request.uri().path());
    let needs_token = !is_preflight && !is_bridge;
    let caller = api::caller(&state, request.headers());
    let has_rate = match &caller {
        _ if is_preflight => Ok(()),
        Ok(caller) => state.rates.of_tenant(&caller.tenant),
        Err(_) => state.rates.denial(ip),
    };
    let mut response = match (has_rate, caller) {
        // Not even its body is read.
        (Err(refusal), _) => {
            state.records.refused(Side::App, ip, refusal.status, Refused::Limit);
            ApiError::from(refusal).into_response()
        }
        (_, Err(denied)) if needs_token => {
            tracing::debug!(%denied, "app refused");
            state.records.refused(Side::App, ip, StatusCode::UNAUTHORIZED, Refused::Token);
            refuse(&state, request, denied.into()).await
        }
        _ if is_preflight => cors::preflight(request.headers(), "GET, POST, PUT, DELETE"),
        (_, caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
    };
    if let Some(origin) = origin {
        cors::allow(&mut response, &origin);
    }
    response
}

async fn refuse(state: &ProxyState, request: Request, error: ApiError) -> Response {
    body::discard(request.into_body(), &state.config).await;
    error.into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mcp_endpoint_has_its_paths_and_no_others() {
        for (path, session) in [("/v1/mcp", ""), ("/v1/mcp/", ""), ("/v1/mcp/abc", "abc"), ("/v1/mcp/abc/", "abc")] {
            assert_eq!(mcp_session(path), Some(session), "{path}");
        }
        for other in
            ["/v1/mcpx", "/v1/mcp/a/b", "/v1/mcp/a//", "/v1/mcp//", "/v1/mcp//a", "/v1", "/", "/health", "/x/v1/mcp"]
        {
            assert_eq!(mcp_session(other), None, "{other}");
        }
    }
}
