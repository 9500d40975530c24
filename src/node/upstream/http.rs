//! How rmcp reaches an MCP server over HTTP: with our HTTP client, and a token that is read from a file.
//!
//! The server's user may give it a new token while we run, so the file is read again when the server refuses ours,
//! and the request is sent once more. A refused request was not carried out.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse, StreamableHttpResponseLimits,
};
use sse_stream::{Sse, SseStream};

use crate::http_client::{self, HttpClient, HttpError};
use crate::protocol::SESSION_HEADER;

/// How long to try to connect: a server that restarts is back by then, one that does not run is soon known.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// The most bytes of a JSON answer: as much as an answer may take on its way to the proxy, and its frame.
pub const MAX_JSON_BYTES: usize = 32 * 1024 * 1024;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Why a request to the server has no answer.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamHttpError {
    /// It cannot be reached, or broke off.
    #[error("it {0}")]
    Http(#[from] HttpError),
    /// It does not let us in.
    #[error("it refuses the token (HTTP 401)")]
    Unauthorized,
    /// The token cannot be read.
    #[error("the token file {} cannot be used: {why}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The URL, or a header, cannot be used.
    #[error("{0}")]
    Unusable(String),
}

type Result<T> = std::result::Result<T, StreamableHttpError<UpstreamHttpError>>;

/// The HTTP client of one server.
#[derive(Debug, Clone)]
pub struct UpstreamHttp {
    http: HttpClient,
    token: Arc<TokenFile>,
}

impl UpstreamHttp {
    /// A client for URLs like `uri`.
    ///
    /// # Errors
    /// A sentence, if TLS is needed and cannot be used.
    pub fn new(uri: &Uri, token_file: Option<PathBuf>) -> std::result::Result<Self, String> {
        let token = Arc::new(TokenFile { path: token_file, known: Mutex::new(None) });
        Ok(UpstreamHttp { http: HttpClient::new(uri)?, token })
    }

    async fn send(
        &self,
        method: Method,
        uri: &str,
        mut headers: HeaderMap,
        custom: HashMap<HeaderName, HeaderValue>,
        session: Option<&str>,
        body: Bytes,
    ) -> Result<Response<Incoming>> {
        let unusable = |what: &str| UpstreamHttpError::Unusable(format!("{what} cannot be used"));
        let uri: Uri = uri.parse().map_err(|_| StreamableHttpError::Client(unusable("its URL")))?;
        headers.extend(custom);
        if let Some(session) = session {
            let value = HeaderValue::from_str(session);
            let value = value.map_err(|_| StreamableHttpError::Client(unusable("its session id")))?;
            headers.insert(SESSION_HEADER, value);
        }
        let mut has_retried = false;
        loop {
            if let Some(value) = self.token.value(has_retried).map_err(StreamableHttpError::Client)? {
                headers.insert(AUTHORIZATION, value);
            }
            let response = self.http.send(method.clone(), &uri, &headers, body.clone(), CONNECT_PATIENCE);
            let response = response.await.map_err(|error| StreamableHttpError::Client(error.into()))?;
            match response.status() {
                StatusCode::UNAUTHORIZED if has_retried || self.token.path.is_none() => {
                    return Err(StreamableHttpError::Client(UpstreamHttpError::Unauthorized));
                }
                StatusCode::UNAUTHORIZED => has_retried = true,
                _ => return Ok(response),
            }
        }
    }
}

/// A token as a file holds it.
#[derive(Debug)]
struct TokenFile {
    path: Option<PathBuf>,
    known: Mutex<Option<HeaderValue>>,
}

impl TokenFile {
    /// The header's value; the file is read when it is needed first, and when `anew`.
    fn value(&self, anew: bool) -> std::result::Result<Option<HeaderValue>, UpstreamHttpError> {
        let Some(path) = &self.path else { return Ok(None) };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none() || anew {
            let unusable = |why: String| UpstreamHttpError::TokenFile { path: path.clone(), why };
            // A small local file, so reading it holds nobody up.
            let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
            let token = text.trim_start_matches('\u{feff}').trim();
            let is_usable = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
            let value = HeaderValue::try_from(format!("Bearer {token}")).ok().filter(|_| is_usable);
            let mut value =
                value.ok_or_else(|| unusable("it must hold one line of visible ASCII characters".into()))?;
            value.set_sensitive(true);
            *known = Some(value);
        }
        Ok(known.clone())
    }
}

impl StreamableHttpClient for UpstreamHttp {
    type Error = UpstreamHttpError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse> {
        let limits = StreamableHttpResponseLimits::default();
        self.post_message_with_response_limits(uri, message, session_id, auth_header, custom_headers, limits).await
    }

    async fn post_message_with_response_limits(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
        limits: StreamableHttpResponseLimits,
    ) -> Result<StreamableHttpPostResponse> {
        let body = serde_json::to_vec(&message)?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        let response =
            self.send(Method::POST, &uri, headers, custom_headers, session_id.as_deref(), body.into()).await?;
        let status = response.status();
        if status == StatusCode::NOT_FOUND && session_id.is_some() {
            return Err(StreamableHttpError::SessionExpired);
        }
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        let new_session = response.headers().get(SESSION_HEADER).and_then(|id| id.to_str().ok()).map(str::to_owned);
        if status.is_success() && is(&response, "text/event-stream") {
            return Ok(StreamableHttpPostResponse::Sse(events(response), new_session));
        }
        let is_json = is(&response, "application/json");
        let limit = if is_json { limits.max_json_response_size } else { limits.max_error_response_size };
        let body = http_client::read(response.into_body(), limit).await;
        let body = body.map_err(|error| StreamableHttpError::Client(error.into()))?;
        let answer = is_json.then(|| serde_json::from_slice::<ServerJsonRpcMessage>(&body));
        match answer {
            // An error that names no request would never reach the one that waits for it. With 400, servers say so
            // of a session that they have forgotten, though MCP wants 404.
            Some(Ok(ServerJsonRpcMessage::Error(error))) if error.id.is_none() => {
                if status == StatusCode::BAD_REQUEST && session_id.is_some() {
                    return Err(StreamableHttpError::SessionExpired);
                }
                Err(StreamableHttpError::UnexpectedServerResponse(
                    format!("HTTP {status}: {}", error.error.message).into(),
                ))
            }
            // A JSON-RPC error may come with any status.
            Some(Ok(answer)) if status.is_success() || matches!(answer, ServerJsonRpcMessage::Error(_)) => {
                Ok(StreamableHttpPostResponse::Json(answer, new_session))
            }
            // Only requests are answered; what comes back for anything else does not matter.
            _ if status.is_success() && !matches!(message, ClientJsonRpcMessage::Request(_)) => {
                Ok(StreamableHttpPostResponse::Accepted)
            }
            Some(Err(error)) if status.is_success() => Err(error.into()),
            _ => {
                let start: String = String::from_utf8_lossy(&body).chars().take(200).collect();
                Err(StreamableHttpError::UnexpectedServerResponse(format!("HTTP {status}: {start}").into()))
            }
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<()> {
        let headers = HeaderMap::new();
        let response =
            self.send(Method::DELETE, &uri, headers, custom_headers, Some(&session_id), Bytes::new()).await?;
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportDeleteSession),
            _ => Ok(()),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, std::result::Result<Sse, SseError>>> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(id) = last_event_id.and_then(|id| HeaderValue::from_str(&id).ok()) {
            headers.insert(LAST_EVENT_ID, id);
        }
        let response =
            self.send(Method::GET, &uri, headers, custom_headers, session_id.as_deref(), Bytes::new()).await?;
        match response.status() {
            StatusCode::NOT_FOUND if session_id.is_some() => Err(StreamableHttpError::SessionExpired),
            status if status.is_success() && is(&response, "text/event-stream") => Ok(events(response)),
            // Some answer GET with a page for people.
            status if status.is_success() => Err(StreamableHttpError::ServerDoesNotSupportSse),
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportSse),
            status => Err(StreamableHttpError::UnexpectedServerResponse(format!("HTTP {status}").into())),
        }
    }
}

fn is(response: &Response<Incoming>, media_type: &str) -> bool {
    let given = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    given.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(media_type)
}

fn events(response: Response<Incoming>) -> BoxStream<'static, std::result::Result<Sse, SseError>> {
    SseStream::from_bytes_stream(response.into_body().into_data_stream()).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_is_read_again_only_when_it_must_be() {
        let path = std::env::temp_dir().join(format!("token-{}", uuid::Uuid::new_v4()));
        let token = TokenFile { path: Some(path.clone()), known: Mutex::new(None) };
        assert!(token.value(false).unwrap_err().to_string().contains("cannot be used"));
        std::fs::write(&path, "\u{feff} one \r\n").unwrap();
        assert_eq!(token.value(false).unwrap().unwrap(), "Bearer one");
        std::fs::write(&path, "two").unwrap();
        assert_eq!(token.value(false).unwrap().unwrap(), "Bearer one");
        assert_eq!(token.value(true).unwrap().unwrap(), "Bearer two");
        for bad in ["", " \n", "a canary", "é"] {
            std::fs::write(&path, bad).unwrap();
            let error = token.value(true).unwrap_err().to_string();
            assert!(error.contains("visible ASCII") && !error.contains("canary"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(TokenFile { path: None, known: Mutex::new(None) }.value(true).unwrap(), None);
    }
}
