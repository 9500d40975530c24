//! The errors of the app-facing API: `{"detail": "sentence"}`.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};

use crate::auth::Denied;
use crate::json;
use crate::proxy::gate::Refusal;

/// An answer other than success.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    detail: String,
}

impl ApiError {
    /// An error with this status and sentence.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, detail: detail.into() }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The sentence alone.
    pub fn into_detail(self) -> String {
        self.detail
    }

    /// The session does not exist, or is not the caller's; the two look the same.
    pub fn unknown_session() -> Self {
        ApiError::new(StatusCode::NOT_FOUND, "There is no such chat session.")
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        ApiError::new(refusal.status, refusal.message)
    }
}

impl From<Denied> for ApiError {
    fn from(denied: Denied) -> Self {
        ApiError::new(StatusCode::UNAUTHORIZED, denied.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut body = b"{\"detail\":".to_vec();
        json::push_string(&mut body, &self.detail);
        body.push(b'}');
        respond(self.status, body)
    }
}

/// A JSON response, with the headers that go with its status.
pub fn respond(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    match status {
        StatusCode::UNAUTHORIZED => headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))
        }
        _ => None,
    };
    response
}
