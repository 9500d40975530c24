//! What MCP clients reach: `POST /v1/mcp/{id}`, and `POST /v1/mcp` with the session in a header. If the setting
//! `legacy_sse` is on, older clients may GET a stream of changes there.
//!
//! HTTP on this side, [`crate::mcp`] on the other. Errors are JSON-RPC errors with the request's id, because
//! clients show nothing else to their users; tool trouble is a result, because three errors in a row make
//! OpenClaw pause the server.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::join_all;
use http::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;

use crate::auth::{self, Denied, LastToken};
use crate::json;
use crate::jsonrpc::{self, INVALID_REQUEST, Message, PARSE_ERROR, Params};
use crate::mcp::listen::{ListenStream, Listeners, TooMany};
use crate::mcp::{self, Answer, CallParams, Era, Event, NotCalled, Reply, Told, ToolView, Tools, dispatch};
use crate::protocol::{Context, SESSION_HEADER, SESSION_HEADER_ALIAS, SessionId, TraceMembers};
use crate::proxy::bridge::{Call, CallError, CallRequest};
use crate::proxy::config::{CancelOnDisconnect, Config};
use crate::proxy::error::respond;
use crate::proxy::gate::{self, Refusal};
use crate::proxy::memory::{NoRoom, Share};
use crate::proxy::metrics::{CallEnd, Limit, Refused, Side};
use crate::proxy::records::CallRecord;
use crate::proxy::registry::Entry;
use crate::proxy::tenants::{Client, Place, Role, Tenant, TooManyCalls};
use crate::proxy::trace::CallTrace;
use crate::proxy::trace::context::Origin;
use crate::proxy::{ProxyState, body, cors, routes};

/// Our own error codes are HTTP statuses: JSON-RPC reserves the negative ones, and clients misread some of them.
const NOT_FOUND: i64 = 404;

const SESSION: HeaderName = HeaderName::from_static(SESSION_HEADER);
const ALIAS: HeaderName = HeaderName::from_static(SESSION_HEADER_ALIAS);

/// What a request says before its body.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// Where it really comes from.
    ip: IpAddr,
    /// The session in its path; empty if there is none.
    in_path: &'a str,
    headers: &'a HeaderMap,
    /// The token that came over its connection before.
    last_token: &'a LastToken,
}

/// Every method on the MCP endpoint.
pub async fn endpoint(
    state: &Arc<ProxyState>,
    peer: IpAddr,
    last_token: &LastToken,
    request: http::Request<Incoming>,
) -> Response {
    let (parts, request_body) = request.into_parts();
    let ip = gate::client_ip(&state.config, &parts.headers, peer);
    let in_path = routes::mcp_session(parts.uri.path()).unwrap_or_default();
    let head = Head { ip, in_path, headers: &parts.headers, last_token };
    let origin = match state.gate.check(&parts.headers) {
        Ok(origin) => origin,
        Err(refusal) => {
            state.records.refused(Side::Client, ip, refusal.status, Refused::Gate);
            body::discard(request_body, &state.config).await;
            return refused(refusal);
        }
    };
    if let Err(refusal) = state.rates.request(ip) {
        state.records.refused(Side::Client, ip, refusal.status, Refused::Limit);
        return refused(refusal);
    }
    let mut response = match parts.method {
        Method::POST => post(state, head, request_body).await,
        Method::GET if state.config.legacy_sse => get(state, head).unwrap_or_else(refused),
        Method::OPTIONS if origin.is_some() => cors::preflight(&parts.headers, methods(&state.config)),
        _ => {
            body::discard(request_body, &state.config).await;
            method_not_allowed(methods(&state.config))
        }
    };
    if let Some(origin) = origin {
        cors::allow(&mut response, origin);
    }
    response
}

fn refused(refusal: Refusal) -> Response {
    let code = i64::from(refusal.status.as_u16());
    respond(refusal.status, jsonrpc::error(None, code, &refusal.message, None))
}

fn methods(config: &Config) -> &'static str {
    if config.legacy_sse { "GET, POST" } else { "POST" }
}

fn method_not_allowed(allowed: &'static str) -> Response {
    let message = match allowed {
        "POST" => "Only POST is served here: there is no event stream to GET, and no MCP session to DELETE.",
        _ => "Only POST and GET are served here: there is no MCP session to DELETE.",
    };
    let mut response = refused(Refusal { status: StatusCode::METHOD_NOT_ALLOWED, message: message.to_owned() });
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

async fn post(state: &Arc<ProxyState>, head: Head<'_>, request_body: Incoming) -> Response {
    let Head { ip, headers, .. } = head;
    let version = state.tenants.version();
    let (mut target, tenant) = match Target::admit(state, head) {
        Ok(target) => target,
        Err(NotAdmitted::Denied(denied)) => return unauthorized(state, headers, request_body, denied).await,
        // Not even the body is read.
        Err(NotAdmitted::TooMany(refusal)) => return refused(refusal),
    };
    if let Err(refusal) = gate::check_json_body(headers) {
        body::discard(request_body, &state.config).await;
        return refused(refusal);
    }
    let body = match body::read(headers, request_body, state, Some(&tenant)).await {
        Ok(body) => body,
        Err(refusal) => {
            if matches!(refusal.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                state.records.refused(Side::Client, ip, refusal.status, Refused::Limit);
            }
            return refused(refusal);
        }
    };
    // Whose the token is may have changed while the body came.
    if state.tenants.version() != version {
        target = match Target::of(state, head) {
            (target, Ok(_)) => target,
            (_, Err(denied)) => {
                state.records.refused(Side::Client, ip, StatusCode::UNAUTHORIZED, Refused::Token);
                return refused(Refusal { status: StatusCode::UNAUTHORIZED, message: denied.to_string() });
            }
        };
    }
    let Ok(text) = simdutf8::basic::from_utf8(&body) else {
        return respond(
            StatusCode::BAD_REQUEST,
            jsonrpc::error(None, PARSE_ERROR, "The body is not valid UTF-8.", None),
        );
    };
    if text.trim_start().starts_with('[') {
        return batch(state, ip, &target, headers, text).await;
    }
    match answer(state, ip, &target, headers, text, accepts_stream(headers)).await {
        None => accepted(),
        Some(Answer::Json(status, body)) => respond(status, body),
        Some(Answer::List(pieces)) => respond(StatusCode::OK, Body::new(body::Pieces::from(pieces))),
        Some(Answer::Stream(stream)) => event_stream(Body::from_stream(stream.into_bytes())),
        Some(Answer::Listen(stream)) => event_stream(Body::from_stream(stream.into_bytes())),
    }
}

/// Answers 401. Python's client shows the sentence to its user only if the error carries the request's id, so the
/// body is read for it, as far as it is small.
async fn unauthorized(state: &ProxyState, headers: &HeaderMap, request_body: Incoming, denied: Denied) -> Response {
    const MAX_BYTES: usize = 16 * 1024;
    let body = match request_body.size_hint().upper() {
        Some(size) if size <= MAX_BYTES as u64 => body::read(headers, request_body, state, None).await.ok(),
        _ => {
            body::discard(request_body, &state.config).await;
            None
        }
    };
    let text = body.as_ref().and_then(|body| std::str::from_utf8(body).ok());
    let message = text.map(|text| Message::parse(text, state.config.max_json_depth));
    let id = match &message {
        Some(Ok(Message::Request { id, .. })) => Some(*id),
        _ => None,
    };
    respond(StatusCode::UNAUTHORIZED, jsonrpc::error(id, 401, &denied.to_string(), None))
}

/// The stream of changes for clients up to 2025-11-25. Where they can hear of none it is as if there were no GET:
/// every client takes a 405 in silence.
fn get(state: &ProxyState, head: Head<'_>) -> Result<Response, Refusal> {
    let Head { ip, headers, .. } = head;
    let (target, _) = Target::admit(state, head).map_err(|not_admitted| match not_admitted {
        NotAdmitted::Denied(denied) => Refusal { status: StatusCode::UNAUTHORIZED, message: denied.to_string() },
        NotAdmitted::TooMany(refusal) => refusal,
    })?;
    let entry = target.session(false).map_err(|(status, _, message)| {
        target.tell_foreign(state, ip, status);
        Refusal { status, message }
    })?;
    let is_legacy = headers.get(mcp::headers::PROTOCOL_VERSION).is_none_or(|version| version != mcp::MODERN_VERSION);
    let Some(entry) = entry.filter(|entry| is_legacy && entry.session.registration.features.tools) else {
        return Ok(method_not_allowed("POST"));
    };
    if !accepts_stream(headers) {
        let message = "An event stream is served here, and the header Accept does not allow 'text/event-stream'.";
        return Err(Refusal { status: StatusCode::NOT_ACCEPTABLE, message: message.to_owned() });
    }
    let too_many = |error: TooMany| {
        too_many_listeners(state, ip);
        Refusal { status: StatusCode::TOO_MANY_REQUESTS, message: error.to_string() }
    };
    let stream = ListenStream::legacy(entry.listeners.join().map_err(too_many)?, state.answer_settings().keep_alive);
    Ok(event_stream(Body::from_stream(stream.into_bytes())))
}

fn too_many_listeners(state: &ProxyState, ip: IpAddr) {
    state.records.limit(Limit::ListenersPerSession);
    state.records.refused(Side::Client, ip, StatusCode::TOO_MANY_REQUESTS, Refused::Limit);
}

fn event_stream(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would hold the events back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// 202, the answer to what is not a request.
fn accepted() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    // What the libraries of MCP send needs no taking apart.
    const USUAL: &[u8] = b"application/json, text/event-stream";
    let accepts = |range: &[u8]| {
        let media_type = gate::media_type(range);
        matches!(media_type, b"*/*" | b"text/*") || media_type.eq_ignore_ascii_case(b"text/event-stream")
    };
    let mut accept = headers.get_all(ACCEPT).iter().map(HeaderValue::as_bytes);
    accept.any(|value| value == USUAL || value.split(|&b| b == b',').any(accepts))
}

/// JSON-RPC batches exist in 2025-03-26 alone, which is also what an unnamed version means.
async fn batch(state: &Arc<ProxyState>, ip: IpAddr, target: &Target, headers: &HeaderMap, text: &str) -> Response {
    let bad = |code, message: &str| respond(StatusCode::BAD_REQUEST, jsonrpc::error(None, code, message, None));
    let version = headers.get(mcp::headers::PROTOCOL_VERSION);
    if version.is_some_and(|version| version != "2025-03-26") {
        return bad(INVALID_REQUEST, "This protocol version has no batches: send one message a request.");
    }
    let limit = state.config.max_batch;
    let messages = match json::few_elements(text, state.config.max_json_depth, limit) {
        Ok(Some(messages)) if !messages.is_empty() => messages,
        Ok(messages) => {
            if messages.is_none() {
                state.records.limit(Limit::Batch);
            }
            return bad(INVALID_REQUEST, &format!("A batch must hold 1 to {limit} messages."));
        }
        Err(error) => return bad(PARSE_ERROR, &format!("{error}.")),
    };
    // At once, so that a batch takes no longer than its slowest call; and counted as they come, so that no more is kept
    // than one answer may take.
    let room = &AtomicUsize::new(state.config.max_result_bytes);
    let each = messages.into_iter().map(async |message| {
        let answer: [Bytes; 3] = match answer(state, ip, target, headers, message, false).await? {
            Answer::Json(_, answer) => [answer, Bytes::new(), Bytes::new()],
            Answer::List(pieces) => pieces,
            // Streams are not accepted here, so there is none.
            Answer::Stream(_) | Answer::Listen(_) => return None,
        };
        let size = answer.iter().map(Bytes::len).sum();
        let fits = room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(size)).is_ok();
        Some(if fits { answer } else { [without_room(state, message).into(), Bytes::new(), Bytes::new()] })
    });
    let mut answers = Vec::new();
    for answer in join_all(each).await.into_iter().flatten() {
        answers.push(Bytes::from_static(if answers.is_empty() { b"[" } else { b"," }));
        answers.extend(answer);
    }
    if answers.is_empty() {
        return accepted();
    }
    answers.push(Bytes::from_static(b"]"));
    respond(StatusCode::OK, Body::new(body::Pieces::from(answers)))
}

/// The answer to a message of a batch whose other answers leave no room for its own.
fn without_room(state: &ProxyState, message: &str) -> Vec<u8> {
    state.records.limit(Limit::ResultBytes);
    let id = match Message::parse(message, state.config.max_json_depth) {
        Ok(Message::Request { id, .. }) => Some(id),
        _ => None,
    };
    let limit = state.config.max_result_bytes;
    let error = format!("The batch's answers take more than {limit} bytes; send this request alone.");
    jsonrpc::error(id, 413, &error, None)
}

/// Answers one message; `None` if it wants no answer.
async fn answer(
    state: &Arc<ProxyState>,
    ip: IpAddr,
    target: &Target,
    headers: &HeaderMap,
    text: &str,
    accepts_stream: bool,
) -> Option<Answer<Running>> {
    let message = match Message::parse(text, state.config.max_json_depth) {
        Ok(message) => message,
        Err(invalid) => {
            if invalid.is_too_deep {
                state.records.limit(Limit::JsonDepth);
            }
            let body = jsonrpc::error(invalid.id, invalid.code, &invalid.message, None);
            return Some(Answer::Json(StatusCode::BAD_REQUEST, body.into()));
        }
    };
    match message {
        Message::Response => None,
        Message::Notification { method, params } => {
            match target.session(true) {
                Ok(Some(entry)) if method == "notifications/cancelled" => {
                    if let Some(id) = params.request_id {
                        entry.bridge.cancel(id, Instant::now());
                    }
                }
                Ok(_) => {}
                Err((status, code, message)) => {
                    target.tell_foreign(state, ip, status);
                    return Some(Answer::Json(status, jsonrpc::error(None, code, &message, None).into()));
                }
            }
            None
        }
        Message::Request { id, method, params } => {
            let request = mcp::Request { id, method: &method, params: &params, headers, accepts_stream };
            let entry = match target.session(request.is_sessionless()) {
                Ok(entry) => entry,
                Err((status, code, message)) => {
                    target.tell_foreign(state, ip, status);
                    return Some(request.error(status, code, &message));
                }
            };
            let tools = entry.map(|entry| SessionTools { entry, state, headers, request_bytes: text.len() });
            let answer = dispatch(&request, tools.as_ref(), &state.answer_settings()).await;
            // Calls have a record of their own.
            if matches!(answer, Answer::Json(StatusCode::TOO_MANY_REQUESTS, _)) && method == "subscriptions/listen" {
                too_many_listeners(state, ip);
            }
            Some(answer)
        }
    }
}

/// Which session a request means.
enum Target {
    /// None is named.
    None,
    /// This one.
    Session(Entry),
    /// One that does not exist. Forgivable, for a handshake, is what a client's library may have said on its own
    /// account: `MCP-Session-Id`. The URL and our own header it only has from its user.
    Unknown { is_forgivable: bool, is_literal: bool, is_foreign: bool },
    /// Headers that contradict each other.
    Conflict,
}

/// Why a client is not let in.
enum NotAdmitted {
    Denied(Denied),
    TooMany(Refusal),
}

impl Target {
    /// The session that a client means, if its token is somebody's or this very session's; and on whose account.
    fn admit(state: &ProxyState, head: Head<'_>) -> Result<(Target, Arc<Tenant>), NotAdmitted> {
        let ip = head.ip;
        let too_many = |refusal: Refusal| {
            state.records.refused(Side::Client, ip, refusal.status, Refused::Limit);
            NotAdmitted::TooMany(refusal)
        };
        let (target, tenant) = Target::of(state, head);
        let tenant = match tenant {
            Ok(tenant) => tenant,
            Err(denied) => {
                state.rates.denial(ip).map_err(too_many)?;
                tracing::debug!(%denied, "MCP client refused");
                state.records.refused(Side::Client, ip, StatusCode::UNAUTHORIZED, Refused::Token);
                return Err(NotAdmitted::Denied(denied));
            }
        };
        state.rates.of_tenant(&tenant).map_err(too_many)?;
        Ok((target, tenant))
    }

    /// The session that a client means, and whose its token is.
    fn of(state: &ProxyState, head: Head<'_>) -> (Target, Result<Arc<Tenant>, Denied>) {
        let token = auth::bearer_token(head.headers);
        let hash = token.map(|token| head.last_token.hash(token));
        let client = Client { tenant: state.tenants.find_hash(Role::Client, hash.as_ref()), hash };
        let target = Target::find(state, &client, head);
        let tenant = match &target {
            Target::Session(entry) => Some(Arc::clone(&entry.owner.tenant)),
            _ => client.tenant,
        };
        (target, tenant.ok_or_else(|| auth::denied(token)))
    }

    /// The path wins over the headers: a client's library may send the header on its own account.
    fn find(state: &ProxyState, client: &Client, head: Head<'_>) -> Target {
        let Head { in_path, headers, .. } = head;
        let now = Instant::now();
        let get = |id: &str| {
            let entry = SessionId::parse(id).and_then(|id| state.registry.get(id, now));
            match entry {
                Some(entry) if entry.owner.admits_client(client) => Ok(entry),
                other => Err(other.is_some()),
            }
        };
        let unknown = |is_forgivable, named: &str, is_foreign| {
            let is_literal = named.contains("${") || (named.contains("$%7B") && !in_path.is_empty());
            Target::Unknown { is_forgivable, is_literal, is_foreign }
        };
        if !in_path.is_empty() {
            return get(in_path).map_or_else(|is_foreign| unknown(false, in_path, is_foreign), Target::Session);
        }
        // Ours wins where a library or a gateway has taken the other for itself.
        let is_forgivable = !headers.contains_key(ALIAS);
        let header = if is_forgivable { SESSION } else { ALIAS };
        let mut named: Option<&str> = None;
        for value in headers.get_all(header) {
            // A value that is not ASCII names no session of ours.
            for id in value.to_str().unwrap_or("?").split(',').map(str::trim).filter(|id| !id.is_empty()) {
                if named.is_some_and(|named| named != id) {
                    return Target::Conflict;
                }
                named = Some(id);
            }
        }
        let Some(named) = named else { return Target::None };
        get(named).map_or_else(|is_foreign| unknown(is_forgivable, named, is_foreign), Target::Session)
    }

    /// A client was told that there is no such session. If there is, it was refused.
    fn tell_foreign(&self, state: &ProxyState, ip: IpAddr, status: StatusCode) {
        if matches!(self, Target::Unknown { is_foreign: true, .. }) {
            state.records.refused(Side::Client, ip, status, Refused::ForeignSession);
        }
    }

    /// The session to serve. A `sessionless` message gets through whatever a header says.
    fn session(&self, sessionless: bool) -> Result<Option<&Entry>, (StatusCode, i64, String)> {
        match self {
            Target::Session(entry) => Ok(Some(entry)),
            Target::None => Ok(None),
            Target::Unknown { is_forgivable: true, .. } | Target::Conflict if sessionless => Ok(None),
            Target::Unknown { is_literal: true, .. } => {
                let message =
                    "The session id is a literal ${…}: the client did not expand a variable of its configuration.";
                Err((StatusCode::NOT_FOUND, NOT_FOUND, message.into()))
            }
            Target::Unknown { .. } => {
                let message = "There is no such chat session: it was deleted, or it expired after its app went away.";
                Err((StatusCode::NOT_FOUND, NOT_FOUND, message.into()))
            }
            Target::Conflict => {
                let message = "The session headers name two different chat sessions; send one.";
                Err((StatusCode::BAD_REQUEST, 400, message.into()))
            }
        }
    }
}

/// A session's tools as the dispatcher sees them.
struct SessionTools<'a> {
    entry: &'a Entry,
    state: &'a ProxyState,
    headers: &'a HeaderMap,
    /// The size of the message that is answered.
    request_bytes: usize,
}

impl Tools for SessionTools<'_> {
    type Call = Running;

    fn server_info(&self) -> &Bytes {
        &self.entry.session.server_info
    }

    fn instructions(&self) -> Option<&str> {
        self.entry.session.registration.instructions.as_deref()
    }

    fn list(&self, era: Era) -> &Bytes {
        let tools = &self.entry.session.registration.tools;
        match era {
            Era::Legacy(_) => tools.legacy_list(),
            Era::Modern(_) => tools.modern_list(),
        }
    }

    fn tool(&self, name: &str) -> Option<ToolView<'_>> {
        let tool = self.entry.session.registration.tools.get(name)?;
        Some(ToolView { output: tool.output, param_headers: &tool.param_headers })
    }

    fn call(&self, call: CallParams<'_>) -> Result<Running, NotCalled> {
        let records = &self.state.records;
        let now = Instant::now();
        let mut record = records.call_begins(|| self.entry.who(), call.name, call.arguments, now);
        let origin = self.origin(&call);
        if let Some(tracer) = records.tracer() {
            record.trace = tracer.begin(&origin, || self.entry.who(), call.name, call.era.version());
        }
        let span = record.trace.as_ref().map(CallTrace::traceparent);
        let started = self.start(call, origin.members(span), now);
        match started {
            Ok((call, place)) => {
                record.trace.iter_mut().for_each(CallTrace::started);
                Ok(Running { call, record: Some(record), result_bytes: 0, _place: place })
            }
            Err(error) => {
                if let Some(limit) = error.limit() {
                    records.limit(limit);
                }
                let (end, error) = (error.end(), NotCalled::from(error));
                if let Some(trace) = &mut record.trace {
                    trace.answered(error.status());
                }
                records.call_ended(record, end, 0, None);
                Err(error)
            }
        }
    }

    fn listeners(&self, era: Era) -> Option<&Listeners> {
        let can_be_told = matches!(era, Era::Modern(_)) || self.state.config.legacy_sse;
        let has_news = self.entry.session.registration.features.tools;
        (can_be_told && has_news).then_some(&*self.entry.listeners)
    }
}

/// Why a call was not started.
enum NotStarted {
    TooMany(TooManyCalls),
    NoRoom(NoRoom),
    Failed(CallError),
}

impl NotStarted {
    fn end(&self) -> CallEnd {
        match self {
            NotStarted::TooMany(TooManyCalls::Tenant(_)) | NotStarted::NoRoom(NoRoom::Tenant(_)) => CallEnd::TenantBusy,
            NotStarted::TooMany(TooManyCalls::Everybody(_)) | NotStarted::NoRoom(NoRoom::Everybody(_)) => {
                CallEnd::ProxyBusy
            }
            NotStarted::Failed(error) => error.end(),
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            NotStarted::TooMany(too_many) => Some(too_many.limit()),
            NotStarted::NoRoom(no_room) => Some(no_room.limit()),
            NotStarted::Failed(error) => error.limit(),
        }
    }
}

impl From<NotStarted> for NotCalled {
    fn from(error: NotStarted) -> Self {
        match error {
            NotStarted::TooMany(error @ TooManyCalls::Tenant(_)) => {
                NotCalled::Overloaded(StatusCode::TOO_MANY_REQUESTS, error.to_string())
            }
            NotStarted::TooMany(error @ TooManyCalls::Everybody(_)) => {
                NotCalled::Overloaded(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
            NotStarted::NoRoom(no_room) => {
                let Refusal { status, message } = no_room.into();
                NotCalled::Overloaded(status, message)
            }
            NotStarted::Failed(error) => NotCalled::Failed(error.to_string()),
        }
    }
}

impl SessionTools<'_> {
    /// Where a call comes from, if anybody wants to know it.
    fn origin<'b>(&'b self, call: &CallParams<'b>) -> Origin<'b> {
        let is_traced = self.state.records.tracer().is_some();
        if !is_traced && !self.entry.bridge.features().context {
            return Origin::default();
        }
        let meta = call.params.meta.as_ref().map(|meta| meta.text);
        Origin::of(meta, self.headers, is_traced)
    }

    fn start(
        &self,
        call: CallParams<'_>,
        trace: TraceMembers<'_>,
        now: Instant,
    ) -> Result<(Call, (Place, Option<Share>)), NotStarted> {
        if self.state.is_draining() {
            return Err(NotStarted::Failed(CallError::ShuttingDown));
        }
        let tenant = &self.entry.owner.tenant;
        let place = Place::take(tenant, &self.state.calls).map_err(NotStarted::TooMany)?;
        // The frame is kept beside the request, to be sent again.
        let copies = usize::from(self.entry.bridge.features().resume);
        let copied = match copies {
            0 => None,
            _ => {
                let mut share = Share::new(Some(tenant), &self.state.request_bytes);
                share.grow_to(copies * self.request_bytes).map_err(NotStarted::NoRoom)?;
                Some(share)
            }
        };
        let Params { meta, client_info, input_responses, request_state, .. } = call.params;
        let meta = meta.as_ref();
        let request = CallRequest {
            client_id: call.id,
            tool: call.name,
            arguments: call.arguments,
            kept_bytes: (1 + copies) * self.request_bytes,
            progress: call.progress,
            context: Context {
                client_info: meta.and_then(|meta| meta.client_info).or(*client_info),
                protocol_version: call.era.version(),
                meta: meta.map(|meta| meta.text),
                trace,
                client_capabilities: meta.and_then(|meta| meta.client_capabilities),
                input_responses: *input_responses,
                request_state: *request_state,
            },
            timeout: self.state.config.tool_timeout.0,
            cancel_on_drop: match self.state.config.cancel_on_disconnect {
                CancelOnDisconnect::All => true,
                CancelOnDisconnect::Modern => matches!(call.era, Era::Modern(_)),
            },
        };
        let call = self.entry.bridge.call(request, now).map_err(NotStarted::Failed)?;
        Ok((call, (place, copied)))
    }
}

/// A call in flight with its place, and its line in the audit log.
#[derive(Debug)]
struct Running {
    call: Call,
    record: Option<CallRecord>,
    /// The bytes of what the app answered.
    result_bytes: usize,
    _place: (Place, Option<Share>),
}

impl mcp::Call for Running {
    async fn next(&mut self, until: Instant) -> Event {
        let event = self.call.next(until).await;
        if let Event::Ended(reply) = &event {
            self.result_bytes = match reply {
                Reply::Content(json) | Reply::Result(json) => json.len(),
                Reply::Failed(text) => text.len(),
                Reply::RpcError { message, .. } => message.len(),
            };
            if let Some(trace) = self.record.as_mut().and_then(|record| record.trace.as_mut()) {
                let code = if let Reply::RpcError { code, .. } = reply { Some(*code) } else { None };
                trace.app_ended(code);
            }
        }
        event
    }

    fn answered(&mut self, told: Told, status: StatusCode) {
        let Some((mut record, (end, app_time))) = self.record.take().zip(self.call.end()) else { return };
        if let Some(trace) = &mut record.trace {
            trace.answered(status);
        }
        let records = self.call.records();
        let end = match (end, told) {
            (CallEnd::Ok | CallEnd::ToolError | CallEnd::RpcError, Told::TooLarge) => {
                records.limit(Limit::ResultBytes);
                CallEnd::ResultTooLarge
            }
            (CallEnd::Ok, Told::ToolError) => CallEnd::ToolError,
            (CallEnd::Ok, Told::Malformed) => CallEnd::Malformed,
            (end, _) => end,
        };
        records.call_ended(record, end, self.result_bytes, app_time);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(record) = self.record.take() {
            self.call.records().call_ended(record, CallEnd::ClientGone, 0, None);
        }
    }
}
