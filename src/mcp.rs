//! The server side of MCP, for every version at one URL, without a socket or a session store of its own.
//!
//! Two eras share the endpoint. A *legacy* client (2024-11-05 to 2025-11-25) starts with `initialize`; a *modern*
//! one (2026-07-28) sends self-describing requests and no `initialize`. Both are stateless here: nothing is kept
//! between two requests, and no `Mcp-Session-Id` is ever sent. What the tools are and how they run is behind
//! [`Tools`] and [`Call`].
//!
//! `dispatch` decides by the method; [`headers`] checks what a modern client repeats in headers; [`result`] turns
//! what an app answered into what the client's version takes; [`stream`] holds an answer open; [`listen`] tells of
//! changes; [`schema`] finds what a tool's schema asks of headers.

pub mod headers;
pub mod listen;
pub mod result;
pub mod schema;
pub mod stream;

use std::future::Future;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::json;
use crate::jsonrpc::{self, INVALID_PARAMS, MAX_ID_BYTES, METHOD_NOT_FOUND, Params};
use headers::ParamHeaders;
use listen::{ListenStream, Listeners};
use result::Shape;
use stream::CallStream;

/// The versions that begin with `initialize`, oldest first.
pub const LEGACY_VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
/// The stateless version.
pub const MODERN_VERSION: &str = "2026-07-28";
/// The version of a legacy request that names none.
const UNNAMED_VERSION: &str = "2025-03-26";

/// The headers do not match the body (2026-07-28).
pub const HEADER_MISMATCH: i64 = -32020;
/// The client lacks a capability that the request needs (2026-07-28).
pub const MISSING_CAPABILITY: i64 = -32021;
/// The protocol version is not spoken here (2026-07-28).
pub const UNSUPPORTED_VERSION: i64 = -32022;

/// Where results carry the server's identity.
const SERVER_INFO_KEY: &str = "io.modelcontextprotocol/serverInfo";
/// The name by which the server is known to clients.
const SERVER_NAME: &str = "openclaw-mcp-proxy";

/// The server's identity, as JSON text.
pub fn server_info(title: Option<&str>) -> Bytes {
    let mut out = format!(r#"{{"name":"{SERVER_NAME}","version":"{}""#, env!("CARGO_PKG_VERSION")).into_bytes();
    if let Some(title) = title {
        out.extend_from_slice(b",\"title\":");
        json::push_string(&mut out, title);
    }
    out.push(b'}');
    out.into()
}

/// How a client speaks, with its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Era {
    /// Up to 2025-11-25.
    Legacy(&'static str),
    /// From 2026-07-28 on.
    Modern(&'static str),
}

impl Era {
    /// The protocol version.
    pub fn version(self) -> &'static str {
        match self {
            Era::Legacy(version) | Era::Modern(version) => version,
        }
    }
}

/// What a tool promises of its structured result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Nothing.
    Unspecified,
    /// An object.
    Object,
    /// Any JSON: only modern clients are told of it, older ones would drop the whole list.
    Any,
}

/// What the dispatcher must know of a tool.
#[derive(Debug, Clone, Copy)]
pub struct ToolView<'a> {
    /// What it promises.
    pub output: Output,
    /// The arguments that modern clients repeat in headers.
    pub param_headers: &'a ParamHeaders,
}

/// What a tool answered, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Any JSON.
    Content(Bytes),
    /// A whole CallToolResult.
    Result(Bytes),
    /// The tool failed; a text for the model.
    Failed(String),
    /// A JSON-RPC error to pass on.
    RpcError {
        /// Its code.
        code: i64,
        /// Its message.
        message: String,
        /// Its data, as JSON text.
        data: Option<Bytes>,
    },
}

/// What a client was told of a call that an app answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// The tool's result.
    Result,
    /// That the tool failed.
    ToolError,
    /// A JSON-RPC error of the app's.
    RpcError,
    /// That the app's answer cannot be used.
    Malformed,
    /// That the answer is too large.
    TooLarge,
}

/// How far a call has got. Each is JSON text; `message` is that of a string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// How far.
    pub progress: String,
    /// Of how much.
    pub total: Option<String>,
    /// In words.
    pub message: Option<String>,
}

/// What happens to a call.
#[derive(Debug)]
pub enum Event {
    /// It has got further.
    Progress(Progress),
    /// It has ended; nothing follows.
    Ended(Reply),
    /// Nothing has happened until the given time.
    Quiet,
}

/// A call in flight. Dropping it cancels it.
pub trait Call: Send + 'static {
    /// The next thing that happens, at the latest at `until`. Ends by itself at the call's deadline. May be
    /// dropped and called again without losing an event.
    fn next(&mut self, until: Instant) -> impl Future<Output = Event> + Send;

    /// The client has been told how it ended, with this HTTP status.
    fn answered(&mut self, _: Told, _: StatusCode) {}
}

/// A tools/call as the client made it.
#[derive(Debug)]
pub struct CallParams<'a> {
    /// The client's JSON-RPC id, as text.
    pub id: &'a str,
    /// The tool's name.
    pub name: &'a str,
    /// The arguments' text; `{}` if there are none.
    pub arguments: &'a str,
    /// The client's era.
    pub era: Era,
    /// What else came with the request.
    pub params: &'a Params<'a>,
    /// Whether progress can be told to the client.
    pub progress: bool,
}

/// A set of tools that are served to MCP clients.
pub trait Tools: Sync {
    /// A call in flight.
    type Call: Call;

    /// The server's identity, as JSON text.
    fn server_info(&self) -> &Bytes;
    /// What clients are told when they connect.
    fn instructions(&self) -> Option<&str>;
    /// The `tools` array for clients of this era, as JSON text.
    fn list(&self, era: Era) -> &Bytes;
    /// The tool of this name.
    fn tool(&self, name: &str) -> Option<ToolView<'_>>;
    /// Starts a call of a tool that exists.
    ///
    /// # Errors
    /// [`NotCalled`] if it could not be started.
    fn call(&self, call: CallParams<'_>) -> Result<Self::Call, NotCalled>;
    /// Those who hear of changes of the list; `None` if clients of this era cannot.
    fn listeners(&self, era: Era) -> Option<&Listeners>;
}

/// Why a call was not started.
#[derive(Debug)]
pub enum NotCalled {
    /// The model is told.
    Failed(String),
    /// The client is told, with an HTTP status: there is too much to do beyond this session.
    Overloaded(StatusCode, String),
}

impl NotCalled {
    /// The HTTP status with which that is told.
    pub fn status(&self) -> StatusCode {
        match self {
            NotCalled::Failed(_) => StatusCode::OK,
            NotCalled::Overloaded(status, _) => *status,
        }
    }
}

impl<E: std::error::Error> From<E> for NotCalled {
    fn from(error: E) -> Self {
        NotCalled::Failed(error.to_string())
    }
}

/// The times and bounds of answers.
#[derive(Debug, Clone, Copy)]
pub struct AnswerSettings {
    /// When a call that is still running is answered by an event stream.
    pub stream_after: Duration,
    /// How often an event stream gets a comment.
    pub keep_alive: Duration,
    /// The most bytes of a call's answer.
    pub max_result_bytes: usize,
}

/// What a request is answered with.
#[derive(Debug)]
pub enum Answer<C> {
    /// A whole JSON body.
    Json(StatusCode, Bytes),
    /// A list of tools as it is kept, between the beginning and the end of a JSON body.
    List([Bytes; 3]),
    /// The events of a call that is still running.
    Stream(CallStream<C>),
    /// The changes of the list of tools.
    Listen(ListenStream),
}

/// One request with what dispatching needs to know of it.
#[derive(Debug)]
pub struct Request<'a> {
    /// The id's text.
    pub id: &'a str,
    /// The method.
    pub method: &'a str,
    /// Its parameters.
    pub params: &'a Params<'a>,
    /// The HTTP headers.
    pub headers: &'a HeaderMap,
    /// Whether the answer may be an event stream.
    pub accepts_stream: bool,
}

impl Request<'_> {
    /// Whether the method is answered without knowing a session: a client whose library leaves a configured
    /// session header out of its handshake must still get through it.
    pub fn is_sessionless(&self) -> bool {
        matches!(self.method, "initialize" | "ping" | "server/discover")
    }

    /// An error answer to this request.
    pub fn error<C>(&self, status: StatusCode, code: i64, message: &str) -> Answer<C> {
        Answer::Json(status, jsonrpc::error(Some(self.id), code, message, None).into())
    }
}

/// 2026-07-28 gives some errors an HTTP status of their own; before, all are carried by a 200.
fn error_status(era: Era, code: i64) -> StatusCode {
    match (era, code) {
        (Era::Modern(_), HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION) => StatusCode::BAD_REQUEST,
        (Era::Modern(_), METHOD_NOT_FOUND) => StatusCode::NOT_FOUND,
        _ => StatusCode::OK,
    }
}

/// An answer of so many bytes is given to the connection, and its call ends there.
const SMALL_ANSWER: usize = 16 * 1024;

/// The data of an error that passes by itself.
const RETRY_SOON: &str = r#"{"retryAfterMs":1000}"#;

/// Answers one request. `tools` is `None` if no session was named.
pub async fn dispatch<T: Tools>(
    request: &Request<'_>,
    tools: Option<&T>,
    settings: &AnswerSettings,
) -> Answer<T::Call> {
    let era = match era(request) {
        Ok(era) => era,
        Err((status, body)) => return Answer::Json(status, body.into()),
    };
    match (request.method, era) {
        ("initialize", Era::Legacy(_)) => Answer::Json(StatusCode::OK, initialize(request, tools).into()),
        ("ping", Era::Legacy(_)) => Answer::Json(StatusCode::OK, jsonrpc::result(request.id, b"{}").into()),
        ("server/discover", Era::Modern(_)) => Answer::Json(StatusCode::OK, discover(request, tools).into()),
        ("tools/list", _) => list(request, era, tools),
        ("tools/call", _) => call(request, era, tools, settings).await,
        ("subscriptions/listen", Era::Modern(_)) => subscribe(request, era, tools, settings),
        _ => unknown_method(request, era),
    }
}

fn unknown_method<C>(request: &Request<'_>, era: Era) -> Answer<C> {
    let message = format!("The method {} does not exist here.", shown(request.method));
    request.error(error_status(era, METHOD_NOT_FOUND), METHOD_NOT_FOUND, &message)
}

/// A client's text in a message of ours: quoted, escaped and cut.
fn shown(text: &str) -> String {
    let shown: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    format!("'{shown}'")
}

/// Which era a request belongs to, and whether it keeps that era's rules (2026-07-28, "Versioning").
fn era(request: &Request<'_>) -> Result<Era, (StatusCode, Vec<u8>)> {
    let bad =
        |code, message: &str| Err((StatusCode::BAD_REQUEST, jsonrpc::error(Some(request.id), code, message, None)));
    let header = match headers::single(request.headers, &headers::PROTOCOL_VERSION) {
        Ok(header) => header,
        Err(message) => return bad(HEADER_MISMATCH, &message),
    };
    let in_meta = request.params.meta.as_ref().and_then(|meta| meta.protocol_version);
    let is_modern = in_meta.is_some()
        || request.method == "server/discover"
        || (request.method != "initialize" && header.is_some_and(|version| version == MODERN_VERSION));
    if !is_modern {
        let version = match header {
            // The version is being negotiated: the header says nothing yet.
            _ if request.method == "initialize" => LEGACY_VERSIONS[3],
            None => UNNAMED_VERSION,
            Some(header) => match LEGACY_VERSIONS.into_iter().find(|version| *version == header) {
                Some(version) => version,
                None => return Err(unsupported_version(request, header)),
            },
        };
        return Ok(Era::Legacy(version));
    }
    let Some(version) = in_meta.and_then(json::as_string) else {
        return bad(INVALID_PARAMS, "params._meta must hold 'io.modelcontextprotocol/protocolVersion', a string.");
    };
    let capabilities = request.params.meta.as_ref().and_then(|meta| meta.client_capabilities);
    if !capabilities.is_some_and(json::is_object) {
        return bad(INVALID_PARAMS, "params._meta must hold 'io.modelcontextprotocol/clientCapabilities', an object.");
    }
    if let Err(message) = headers::expect(request.headers, &headers::PROTOCOL_VERSION, &version, false) {
        return bad(HEADER_MISMATCH, &message);
    }
    if version != MODERN_VERSION {
        return Err(unsupported_version(request, &version));
    }
    if let Err(message) = headers::expect(request.headers, &headers::METHOD, request.method, false) {
        return bad(HEADER_MISMATCH, &message);
    }
    Ok(Era::Modern(MODERN_VERSION))
}

fn unsupported_version(request: &Request<'_>, requested: &str) -> (StatusCode, Vec<u8>) {
    let requested: String = requested.chars().take(64).collect();
    let supported: Vec<&str> = LEGACY_VERSIONS.into_iter().chain([MODERN_VERSION]).collect();
    let data = serde_json::json!({ "supported": supported, "requested": requested }).to_string();
    let message = format!("The protocol version {} is not spoken here.", shown(&requested));
    (StatusCode::BAD_REQUEST, jsonrpc::error(Some(request.id), UNSUPPORTED_VERSION, &message, Some(&data)))
}

fn initialize<T: Tools>(request: &Request<'_>, tools: Option<&T>) -> Vec<u8> {
    let offered = request.params.protocol_version.and_then(json::as_string).unwrap_or_default();
    let version = LEGACY_VERSIONS.into_iter().find(|version| *version == offered).unwrap_or(LEGACY_VERSIONS[3]);
    let mut out = jsonrpc::result_prefix(request.id, 256);
    out.extend_from_slice(b"{\"protocolVersion\":\"");
    out.extend_from_slice(version.as_bytes());
    out.extend_from_slice(b"\",");
    push_capabilities(&mut out, Era::Legacy(version), tools);
    out.extend_from_slice(b",\"serverInfo\":");
    out.extend_from_slice(&identity(tools));
    push_instructions(&mut out, tools);
    out.extend_from_slice(b"}}");
    out
}

fn discover<T: Tools>(request: &Request<'_>, tools: Option<&T>) -> Vec<u8> {
    let mut out = jsonrpc::result_prefix(request.id, 512);
    out.extend_from_slice(b"{\"supportedVersions\":[");
    for version in LEGACY_VERSIONS {
        json::push_string(&mut out, version);
        out.push(b',');
    }
    json::push_string(&mut out, MODERN_VERSION);
    out.extend_from_slice(b"],");
    push_capabilities(&mut out, Era::Modern(MODERN_VERSION), tools);
    push_instructions(&mut out, tools);
    push_modern_list_members(&mut out, &identity(tools));
    out.extend_from_slice(b"}}");
    out
}

fn push_capabilities<T: Tools>(out: &mut Vec<u8>, era: Era, tools: Option<&T>) {
    out.extend_from_slice(match tools.and_then(|tools| tools.listeners(era)) {
        Some(_) => br#""capabilities":{"tools":{"listChanged":true}}"#,
        None => br#""capabilities":{"tools":{}}"#,
    });
}

fn identity<T: Tools>(tools: Option<&T>) -> Bytes {
    tools.map_or_else(|| server_info(None), |tools| tools.server_info().clone())
}

fn push_instructions<T: Tools>(out: &mut Vec<u8>, tools: Option<&T>) {
    if let Some(instructions) = tools.and_then(Tools::instructions) {
        out.extend_from_slice(b",\"instructions\":");
        json::push_string(out, instructions);
    }
}

/// What 2026-07-28 demands of every cacheable result. Tools change whenever their app likes, and one URL may show
/// other tools to another session header: nothing may be kept, and nothing shared.
fn push_modern_list_members(out: &mut Vec<u8>, server_info: &[u8]) {
    out.extend_from_slice(b",\"resultType\":\"complete\",\"ttlMs\":0,\"cacheScope\":\"private\",\"_meta\":{\"");
    out.extend_from_slice(SERVER_INFO_KEY.as_bytes());
    out.extend_from_slice(b"\":");
    out.extend_from_slice(server_info);
    out.push(b'}');
}

fn list<T: Tools>(request: &Request<'_>, era: Era, tools: Option<&T>) -> Answer<T::Call> {
    let Some(tools) = tools else { return no_session(request) };
    if request.params.cursor.is_some() {
        return request.error(StatusCode::OK, INVALID_PARAMS, "The cursor is not known: the list has one page.");
    }
    let mut head = jsonrpc::result_prefix(request.id, 16);
    head.extend_from_slice(b"{\"tools\":");
    let mut tail = Vec::new();
    if let Era::Modern(_) = era {
        push_modern_list_members(&mut tail, tools.server_info());
    }
    tail.extend_from_slice(b"}}");
    Answer::List([head.into(), tools.list(era).clone(), tail.into()])
}

/// The answer where a method needs a session and none was named.
fn no_session<C>(request: &Request<'_>) -> Answer<C> {
    let message = "No chat session is named: use the session's own URL, or send the header MCP-Session-Id.";
    request.error(StatusCode::BAD_REQUEST, 400, message)
}

async fn call<T: Tools>(
    request: &Request<'_>,
    era: Era,
    tools: Option<&T>,
    settings: &AnswerSettings,
) -> Answer<T::Call> {
    let Some(tools) = tools else { return no_session(request) };
    let params = request.params;
    let Some(name) = params.name.and_then(json::as_string) else {
        return request.error(StatusCode::OK, INVALID_PARAMS, "params.name must be a string.");
    };
    let arguments = params.arguments.unwrap_or("{}");
    if !json::is_object(arguments) {
        return request.error(StatusCode::OK, INVALID_PARAMS, "params.arguments must be an object.");
    }
    let token = params.meta.as_ref().and_then(|meta| meta.progress_token);
    // It is kept, and repeated in every report.
    if let Some(size) = token.map(str::len).filter(|size| *size > MAX_ID_BYTES) {
        let message = format!("The progressToken is {size} bytes long; the limit is {MAX_ID_BYTES}.");
        return request.error(StatusCode::OK, INVALID_PARAMS, &message);
    }
    if let Era::Modern(_) = era
        && let Err(message) = headers::expect(request.headers, &headers::NAME, &name, true)
    {
        return request.error(StatusCode::BAD_REQUEST, HEADER_MISMATCH, &message);
    }
    let Some(tool) = tools.tool(&name) else {
        return request.error(StatusCode::OK, INVALID_PARAMS, &format!("Unknown tool: {}.", shown(&name)));
    };
    if let Era::Modern(_) = era
        && let Err(message) = headers::expect_params(request.headers, tool.param_headers, arguments)
    {
        return request.error(StatusCode::BAD_REQUEST, HEADER_MISMATCH, &message);
    }
    let server_info = tools.server_info().clone();
    let shape = Shape { era, output: tool.output, server_info, limit: settings.max_result_bytes };
    let token = token.filter(|token| request.accepts_stream && *token != "null");
    let call = CallParams { id: request.id, name: &name, arguments, era, params, progress: token.is_some() };
    let mut call = match tools.call(call) {
        Ok(call) => call,
        Err(NotCalled::Failed(error)) => return Answer::Json(StatusCode::OK, shape.failed(request.id, &error).into()),
        Err(NotCalled::Overloaded(status, message)) => {
            let code = i64::from(status.as_u16());
            let body = jsonrpc::error(Some(request.id), code, &message, Some(RETRY_SOON));
            return Answer::Json(status, body.into());
        }
    };
    let stream_at = Instant::now() + settings.stream_after;
    let first = match call.next(stream_at).await {
        Event::Ended(reply) => return ended(request, &shape, &reply, call),
        Event::Quiet => None,
        Event::Progress(progress) => Some(progress),
    };
    if request.accepts_stream {
        return Answer::Stream(CallStream::new(call, shape, request.id, token, first, settings.keep_alive));
    }
    // A client that takes no stream waits for the whole answer; the call's own deadline ends the wait.
    loop {
        if let Event::Ended(reply) = call.next(Instant::now() + settings.keep_alive).await {
            return ended(request, &shape, &reply, call);
        }
    }
}

/// Answers `subscriptions/listen`. Where changes are not advertised, the method does not exist.
fn subscribe<T: Tools>(
    request: &Request<'_>,
    era: Era,
    tools: Option<&T>,
    settings: &AnswerSettings,
) -> Answer<T::Call> {
    let Some(tools) = tools else { return no_session(request) };
    let Some(listeners) = tools.listeners(era) else { return unknown_method(request, era) };
    let Some(filter) = request.params.notifications.filter(|filter| json::is_object(filter)) else {
        return request.error(StatusCode::OK, INVALID_PARAMS, "params.notifications must be an object.");
    };
    let wants_changes = match json::member(filter, "toolsListChanged") {
        Some("true") => true,
        None | Some("false" | "null") => false,
        Some(_) => {
            let message = "params.notifications.toolsListChanged must be true or false.";
            return request.error(StatusCode::OK, INVALID_PARAMS, message);
        }
    };
    if !request.accepts_stream {
        let message = "The answer is an event stream, and the header Accept does not allow 'text/event-stream'.";
        return request.error(StatusCode::NOT_ACCEPTABLE, 406, message);
    }
    match listeners.join() {
        Ok(listener) => Answer::Listen(ListenStream::subscription(
            listener,
            request.id,
            wants_changes,
            tools.server_info(),
            settings.keep_alive,
        )),
        Err(too_many) => request.error(StatusCode::TOO_MANY_REQUESTS, 429, &too_many.to_string()),
    }
}

fn ended<C: Call>(request: &Request<'_>, shape: &Shape, reply: &Reply, mut call: C) -> Answer<C> {
    let (status, body, told) = shape.response(request.id, reply);
    call.answered(told, status);
    Answer::Json(status, kept(body, call))
}

/// A call's answer. A large one keeps the call, and what it has of the memory, until it has been sent.
fn kept<C: Call>(answer: Vec<u8>, call: C) -> Bytes {
    struct Kept<C> {
        answer: Vec<u8>,
        _call: C,
    }
    impl<C> AsRef<[u8]> for Kept<C> {
        fn as_ref(&self) -> &[u8] {
            &self.answer
        }
    }
    if answer.len() <= SMALL_ANSWER { answer.into() } else { Bytes::from_owner(Kept { answer, _call: call }) }
}
