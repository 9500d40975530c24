//! CORS for the web pages that are invited (`OPENCLAW_PROXY_ALLOWED_ORIGINS`); nobody else is told anything.

use axum::body::Body;
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, VARY,
};
use http::{HeaderMap, HeaderValue, StatusCode};

/// How long a browser may remember a preflight, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// Answers a browser that asks whether it may send a request.
pub fn preflight(request: &HeaderMap, methods: &'static str) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(methods));
    headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    // Which headers a page sends is its own affair: Mcp-Param-* have names that its tools choose.
    if let Some(asked) = request.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    response
}

/// Lets the page at `origin`, which has passed the gate, read the response.
pub fn allow(response: &mut Response, origin: &str) {
    if let Ok(origin) = HeaderValue::from_str(origin) {
        response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(VARY, HeaderValue::from_static("Origin"));
    }
}
