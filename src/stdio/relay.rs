//! One message's way over HTTP and its answer's way back, as lines.
//!
//! Whoever sent a request hears of it exactly once, whatever happens: what the server answered, or a JSON-RPC error
//! with the request's id. Only a request that its client has cancelled is not answered any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, LOCATION, USER_AGENT};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::answer::{Failure, Kind, classify, is_header_mismatch, refusal};
use super::endpoint::Endpoint;
use super::events::Events;
use super::headers::KnownTools;
use super::lines::{Output, one_line};
use super::message::{Ids, Outgoing};
use crate::http_client::{self, HttpClient, HttpError};
use crate::json;
use crate::jsonrpc::META_PREFIX;
use crate::mcp;
use crate::protocol::{SESSION_HEADER, SESSION_HEADER_ALIAS};

/// Requests that are on their way at once; more of them wait. Each has a connection, and common limits are 256 open
/// files (macOS) and 256 calls a session (the proxy).
pub const MAX_CONCURRENT: usize = 128;
/// The most bytes of one answer.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// The most bytes that are read of an answer with an error status.
const MAX_REFUSAL_BYTES: usize = 1024 * 1024;
/// How long a notification may take: the messages after `notifications/initialized` wait for it.
const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a stream may take to end after its last event, so that its connection can be used again.
const STREAM_END: Duration = Duration::from_secs(1);
/// The most pages of a tool list that are fetched on our own account.
const MAX_LIST_PAGES: usize = 64;
/// The id of our own requests. Each is the only one on its connection, so it cannot be mixed up.
const OWN_ID: &str = "\"openclaw-mcp-stdio\"";

/// What a message's task is told by the loop that started it.
#[derive(Debug, Default)]
pub struct Ticket {
    /// The handshake that must be over first: a later message must not overtake it.
    pub after: Option<CancellationToken>,
    /// Says that this message, which is part of a handshake, has been answered.
    pub opens: Option<DropGuard>,
    /// The client has cancelled the request, and the server has been told: nothing more is said of it.
    pub cancelled: CancellationToken,
    /// The request is on its way: the server has something to cancel.
    pub sent: Arc<AtomicBool>,
}

/// What a legacy handshake has agreed on.
#[derive(Debug, Default)]
struct Agreed {
    /// Named on every later request.
    version: Option<HeaderValue>,
    /// A session id that the server gave out. The proxy gives none, but other servers behind `--url` may.
    minted: Option<HeaderValue>,
}

/// Sends messages to one endpoint. Shared by the tasks that each take care of one message.
#[derive(Debug)]
pub struct Relay {
    http: HttpClient,
    endpoint: Endpoint,
    output: Output,
    slots: Semaphore,
    agreed: Mutex<Agreed>,
    tools: Mutex<KnownTools>,
}

/// What a request was answered with: one line, and what is left of the stream that it came in.
struct Answer {
    line: Vec<u8>,
    rest: Option<Incoming>,
    /// It came with an HTTP status of refusal: the request was not carried out.
    is_refusal: bool,
}

impl Relay {
    /// A relay to `endpoint` that answers on `output`.
    ///
    /// # Errors
    /// A sentence, if the endpoint cannot be talked to in principle.
    pub fn new(endpoint: Endpoint, output: Output) -> Result<Self, String> {
        Ok(Relay {
            http: HttpClient::new(&endpoint.uri)?,
            endpoint,
            output,
            slots: Semaphore::new(MAX_CONCURRENT),
            agreed: Mutex::default(),
            tools: Mutex::default(),
        })
    }

    /// Whether requests must name a session.
    pub fn needs_session(&self) -> bool {
        self.endpoint.needs_session
    }

    /// Sends a message, and its answer, if it wants one, to the output.
    pub async fn run(&self, message: Outgoing, session: Option<HeaderValue>, ticket: Ticket) {
        if let Some(handshake) = &ticket.after {
            handshake.cancelled().await;
        }
        if !message.is_request() {
            return self.notify(&message, session.as_ref()).await;
        }
        let Ok(_slot) = self.slots.acquire().await else { return };
        if ticket.cancelled.is_cancelled() {
            return;
        }
        ticket.sent.store(true, Ordering::Relaxed);
        let (line, rest) = match self.request(&message, session.as_ref(), &ticket.cancelled).await {
            Ok(Answer { line, rest, .. }) => (self.learn(&message, line), rest),
            Err(Failure { code, message: text, data }) => {
                tracing::warn!(method = ?message.method, code, text, "request failed");
                match message.ids.error(code, &text, data.as_deref()) {
                    Some(line) => (line, None),
                    None => return,
                }
            }
        };
        self.say(line, &ticket.cancelled).await;
        drop(ticket);
        if let Some(rest) = rest {
            // A connection that is not at its end by then is closed.
            let _timed_out = tokio::time::timeout(STREAM_END, http_client::read(rest, MAX_REFUSAL_BYTES)).await;
        }
    }

    /// Sends a line to the client, unless it does not want it any more.
    async fn say(&self, line: Vec<u8>, cancelled: &CancellationToken) {
        if !cancelled.is_cancelled() {
            // If stdout is closed, the program is ending.
            let _sent = self.output.send(line).await;
        }
    }

    async fn notify(&self, message: &Outgoing, session: Option<&HeaderValue>) {
        let sent = async {
            let response = self.post(message, session).await?;
            let status = response.status();
            http_client::read(response.into_body(), MAX_REFUSAL_BYTES).await.map(|body| (status, body))
        };
        match tokio::time::timeout(NOTIFICATION_TIMEOUT, sent).await {
            Ok(Ok((status, _))) if status.is_success() => {}
            Ok(Ok((status, body))) => {
                let why = refusal(&message.ids, status, None, &body).err().map(|failure| failure.message);
                tracing::warn!(method = ?message.method, status = status.as_u16(), why, "notification refused");
            }
            Ok(Err(error)) => tracing::warn!(method = ?message.method, %error, "notification failed"),
            Err(_) => tracing::warn!(method = ?message.method, "notification timed out"),
        }
    }

    /// Sends a request until it is answered. If a modern call's headers are refused, the tools have changed: they
    /// are listed again, and the call, which was not carried out, is made once more.
    async fn request(
        &self,
        message: &Outgoing,
        session: Option<&HeaderValue>,
        cancelled: &CancellationToken,
    ) -> Result<Answer, Failure> {
        let answer = self.exchange(message, session, Some(cancelled)).await?;
        let is_modern_call = message.version.is_some() && message.method == "tools/call";
        if !is_modern_call || !answer.is_refusal || !is_header_mismatch(&answer.line) {
            return Ok(answer);
        }
        tracing::debug!("the call's headers do not match; listing the tools again");
        if let Err(failure) = self.list_tools(message, session).await {
            tracing::warn!(code = failure.code, failure.message, "the tools cannot be listed again");
            return Ok(answer);
        }
        self.exchange(message, session, Some(cancelled)).await
    }

    /// Lists the tools as the sender of `message` would.
    async fn list_tools(&self, message: &Outgoing, session: Option<&HeaderValue>) -> Result<(), Failure> {
        let mut cursor: Option<String> = None;
        for page in 0..MAX_LIST_PAGES {
            let list = Outgoing {
                body: list_request(message, cursor.as_deref()),
                ids: Ids::One(OWN_ID.into()),
                method: "tools/list".into(),
                version: message.version.clone(),
                cancels: None,
            };
            let answer = self.exchange(&list, session, None).await?;
            let text = String::from_utf8_lossy(&answer.line);
            lock(&self.tools).learn(&text, page == 0);
            let next = json::member(&text, "result").and_then(|result| json::member(result, "nextCursor"));
            match next.filter(|next| json::is_string(next)) {
                Some(next) => cursor = Some(next.to_owned()),
                None => break,
            }
        }
        Ok(())
    }

    async fn post(&self, message: &Outgoing, session: Option<&HeaderValue>) -> Result<Response<Incoming>, HttpError> {
        let mut headers = lock(&self.tools).headers(message);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("openclaw-mcp-stdio/", env!("CARGO_PKG_VERSION"))));
        if let Some(authorization) = &self.endpoint.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        if let Some(session) = session {
            headers.insert(SESSION_HEADER, session.clone());
            // Gateways that keep sessions of their own take the first one for theirs.
            headers.insert(SESSION_HEADER_ALIAS, session.clone());
        }
        if message.version.is_none() && message.method != "initialize" {
            let agreed = lock(&self.agreed);
            if let Some(version) = &agreed.version {
                headers.insert(mcp::headers::PROTOCOL_VERSION, version.clone());
            }
            if let (Some(minted), None) = (&agreed.minted, session) {
                headers.insert(SESSION_HEADER, minted.clone());
            }
        }
        self.http.post(&self.endpoint.uri, &headers, message.body.clone()).await
    }

    /// Sends a request and reads its answer. What comes before the answer goes to the client, if there is one that
    /// may cancel it.
    async fn exchange(
        &self,
        message: &Outgoing,
        session: Option<&HeaderValue>,
        client: Option<&CancellationToken>,
    ) -> Result<Answer, Failure> {
        let response = self.post(message, session).await.map_err(|error| self.failure(&error))?;
        let (parts, body) = response.into_parts();
        if !parts.status.is_success() {
            // A body that breaks off tells nothing; the status does.
            let body = http_client::read(body, MAX_REFUSAL_BYTES).await.unwrap_or_default();
            return refusal(&message.ids, parts.status, parts.headers.get(LOCATION), &body).map(|line| Answer {
                line,
                rest: None,
                is_refusal: true,
            });
        }
        if message.method == "initialize" {
            lock(&self.agreed).minted = parts.headers.get(SESSION_HEADER).cloned();
        }
        match media_type(&parts.headers).as_str() {
            "application/json" => {
                let body = http_client::read(body, MAX_ANSWER_BYTES).await.map_err(|error| self.failure(&error))?;
                match classify(&message.ids, &body) {
                    Ok(Kind::Answer) => Ok(Answer { line: one_line(&body), rest: None, is_refusal: false }),
                    Ok(Kind::Nameless(failure)) => Err(failure),
                    Ok(Kind::Notice | Kind::Stray) => Err(self.unusable("it does not name the request")),
                    Err(why) => Err(self.unusable(&why)),
                }
            }
            "text/event-stream" => self.stream(message, body, client).await,
            _ if parts.status == StatusCode::ACCEPTED => Err(self.unusable("the request was taken as a notification")),
            other => Err(self.unusable(&format!("it is of type '{}'", other.escape_debug()))),
        }
    }

    /// Reads a stream of events until the request's answer.
    async fn stream(
        &self,
        message: &Outgoing,
        mut body: Incoming,
        client: Option<&CancellationToken>,
    ) -> Result<Answer, Failure> {
        let mut events = Events::new(MAX_ANSWER_BYTES);
        while let Some(chunk) = http_client::next_chunk(&mut body).await.map_err(|error| self.failure(&error))? {
            let complete = events.push(&chunk).map_err(|_| self.failure(&HttpError::TooLarge(MAX_ANSWER_BYTES)))?;
            for data in complete.iter().filter(|data| !data.is_empty()) {
                match classify(&message.ids, data) {
                    Ok(Kind::Answer) => {
                        return Ok(Answer { line: one_line(data), rest: Some(body), is_refusal: false });
                    }
                    Ok(Kind::Notice) => {
                        if let Some(cancelled) = client {
                            self.say(one_line(data), cancelled).await;
                        }
                    }
                    Ok(Kind::Nameless(failure)) => return Err(failure),
                    Ok(Kind::Stray) => tracing::warn!("an event answers another request; it is left out"),
                    Err(why) => tracing::warn!(why, "an event is not usable; it is left out"),
                }
            }
        }
        Err(self.failure(&HttpError::Broken("the stream ended".into())))
    }

    /// What there is to learn from an answer: the version of a handshake, the tools of a list.
    fn learn(&self, message: &Outgoing, line: Vec<u8>) -> Vec<u8> {
        let Ok(text) = std::str::from_utf8(&line) else { return line };
        match &*message.method {
            "initialize" => {
                let version = json::member(text, "result").and_then(|result| json::member(result, "protocolVersion"));
                let version = version.and_then(json::as_string).and_then(|v| HeaderValue::from_str(&v).ok());
                lock(&self.agreed).version = version;
                line
            }
            "tools/list" if message.version.is_some() => {
                let cursor = json::member(message.text(), "params").and_then(|params| json::member(params, "cursor"));
                let is_first_page = cursor.is_none_or(|cursor| cursor == "null");
                lock(&self.tools).learn(text, is_first_page).unwrap_or(line)
            }
            _ => line,
        }
    }

    fn failure(&self, error: &HttpError) -> Failure {
        let status = match error {
            HttpError::Unreachable(_) => StatusCode::SERVICE_UNAVAILABLE,
            HttpError::Silent => StatusCode::GATEWAY_TIMEOUT,
            HttpError::Broken(_) | HttpError::TooLarge(_) => StatusCode::BAD_GATEWAY,
        };
        Failure::new(status, format!("The server at {} {error}.", self.endpoint.origin))
    }

    fn unusable(&self, why: &str) -> Failure {
        let message = format!("The answer of the server at {} is not usable: {why}.", self.endpoint.origin);
        Failure::new(StatusCode::BAD_GATEWAY, message)
    }
}

/// A tools/list of our own, with what `message` says of its sender's version and capabilities.
fn list_request(message: &Outgoing, cursor: Option<&str>) -> Bytes {
    let mut body =
        format!(r#"{{"jsonrpc":"2.0","id":{OWN_ID},"method":"tools/list","params":{{"_meta":{{"#).into_bytes();
    let meta = json::member(message.text(), "params").and_then(|params| json::member(params, "_meta"));
    let mut separator: &[u8] = b"";
    // The message was checked, so walking it again cannot fail.
    let _checked = json::members(meta.unwrap_or("{}"), |key, value| {
        if key.starts_with(META_PREFIX) {
            body.extend_from_slice(separator);
            json::push_string(&mut body, key);
            body.push(b':');
            body.extend_from_slice(value.as_bytes());
            separator = b",";
        }
    });
    body.push(b'}');
    if let Some(cursor) = cursor {
        body.extend_from_slice(b",\"cursor\":");
        body.extend_from_slice(cursor.as_bytes());
    }
    body.extend_from_slice(b"}}");
    body.into()
}

fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Nothing that holds one of these locks can panic halfway through a change.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
