//! What goes over the wire between an app and the proxy: ids, the registration, bridge frames, close codes.
//!
//! Frames from apps are parsed in one pass, in either spelling (`request_id`, `requestId`); frames to an app are
//! spelled as it spelled its registration. JSON that is only relayed stays text.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::json::{self, JsonError, Reader};

/// The header that routes `/v1/mcp` to a session. We read it and never send it.
pub const SESSION_HEADER: &str = "mcp-session-id";
/// The same, for clients and gateways that claim `MCP-Session-Id` for themselves.
pub const SESSION_HEADER_ALIAS: &str = "x-openclaw-session-id";
/// The WebSocket subprotocol that a browser names, beside one that carries its token.
pub const BRIDGE_SUBPROTOCOL: &str = "openclaw-bridge";
/// `bearer.<base64url of the token>`: how a browser, which cannot set headers, sends its token.
pub const BEARER_SUBPROTOCOL_PREFIX: &str = "bearer.";
/// The header with which an app shows the secret of its session, if it asked for one.
pub const SESSION_SECRET_HEADER: &str = "x-session-secret";
/// What precedes such a secret, in Base64 for URLs, where a web page offers it as a subprotocol.
pub const SECRET_SUBPROTOCOL_PREFIX: &str = "session-secret.";

/// A session's id: 122 random bits as 32 lower-case hexadecimal digits (UUID version 4, simple form).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(u128);

impl SessionId {
    /// A new id from the operating system's random numbers.
    pub fn random() -> Self {
        SessionId(uuid::Uuid::new_v4().as_u128())
    }

    /// Reads an id exactly as we write it. Any other text names no session.
    pub fn parse(text: &str) -> Option<Self> {
        let ([high, low], []) = text.as_bytes().as_chunks() else { return None };
        Some(SessionId(u128::from(hex_number(high)?) << 64 | u128::from(hex_number(low)?)))
    }

    /// As it is written: 32 lower-case hexadecimal digits.
    fn digits(self) -> [u8; 32] {
        let mut digits = [0; 32];
        for (pair, byte) in digits.as_chunks_mut::<2>().0.iter_mut().zip(self.0.to_be_bytes()) {
            *pair = [HEX_DIGITS[usize::from(byte >> 4)], HEX_DIGITS[usize::from(byte & 15)]];
        }
        digits
    }

    /// The first eight digits: enough to follow a session through a log, too little to use it.
    pub fn short(self) -> impl fmt::Display {
        struct Short(u128);
        impl fmt::Display for Short {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:08x}", self.0 >> 96)
            }
        }
        Short(self.0)
    }
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

/// What sixteen lower-case hexadecimal digits stand for.
fn hex_number(digits: &[u8; 16]) -> Option<u64> {
    let mut number = 0;
    for digit in digits {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        number = number << 4 | u64::from(value);
    }
    Some(number)
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({}…)", self.short())
    }
}

/// How an app spells the members of frames, known from its registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spelling {
    /// `request_id`, as in the seed's examples.
    #[default]
    Snake,
    /// `requestId`.
    Camel,
}

/// What an app opted in to with `bridge_features`. An app that opted in to nothing sees the plain protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// `invoke_tool.timeout_ms`.
    pub deadline: bool,
    /// `cancel_tool`.
    pub cancel: bool,
    /// `tool_progress`.
    pub progress: bool,
    /// `hello`, and calls that survive a dropped socket.
    pub resume: bool,
    /// `update_tools`.
    pub tools: bool,
    /// `invoke_tool.client`, `meta` and the members of multi round-trip requests.
    pub context: bool,
}

impl Features {
    /// Turns on the feature called `name`; false if there is none.
    pub fn enable(&mut self, name: &str) -> bool {
        let flag = self.flags().into_iter().find_map(|(known, flag)| (known == name).then_some(flag));
        let Some(flag) = flag else { return false };
        *flag = true;
        true
    }

    /// The names of those that are turned on.
    pub fn names(mut self) -> Vec<&'static str> {
        self.flags().into_iter().filter_map(|(name, flag)| flag.then_some(name)).collect()
    }

    fn flags(&mut self) -> [(&'static str, &mut bool); 6] {
        [
            ("deadline", &mut self.deadline),
            ("cancel", &mut self.cancel),
            ("progress", &mut self.progress),
            ("resume", &mut self.resume),
            ("tools", &mut self.tools),
            ("context", &mut self.context),
        ]
    }

    /// Whether the app opted in to anything, and so understands `error` frames.
    pub fn any(self) -> bool {
        self != Features::default()
    }
}

/// Why the proxy closes a bridge: the WebSocket close code and a reason for the app's developer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// The session was deleted.
    Deleted,
    /// The peer keeps breaking the protocol.
    Policy,
    /// The proxy restarts.
    Restart {
        /// How long the app should wait before it comes back, so that not all come at once.
        retry: Duration,
    },
    /// The app token is missing or wrong.
    Unauthorized,
    /// There is no such session.
    UnknownSession,
    /// Another bridge of the session is connected and alive.
    AlreadyConnected,
    /// A newer bridge took over because this one was silent.
    Replaced,
    /// The app did not answer pings.
    Silent,
    /// The app did not read what was sent to it.
    Stalled,
    /// A message was too large.
    TooLarge,
    /// A message took too long to arrive.
    TooSlow,
    /// There was no room in memory for a message.
    NoRoom,
}

impl Close {
    /// The close code. 4401, 4404 and 4409 mean: do not simply reconnect.
    pub fn code(self) -> u16 {
        match self {
            Close::Deleted => 1000,
            Close::Policy | Close::Silent | Close::Stalled | Close::TooSlow => 1008,
            Close::TooLarge => 1009,
            Close::Restart { .. } => 1012,
            Close::NoRoom => 1013,
            Close::Unauthorized => 4401,
            Close::UnknownSession => 4404,
            Close::AlreadyConnected | Close::Replaced => 4409,
        }
    }

    /// The reason: a sentence of at most 123 bytes, as RFC 6455 section 5.5 allows.
    ///
    /// That of a restart ends with `retry_ms=` and a number, which [`retry_of`] reads.
    pub fn reason(self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Close::Deleted => "The session was deleted.",
            Close::Policy => "Too many frames that are not valid bridge messages.",
            Close::Restart { retry } => {
                return format!("The proxy restarts; connect again. retry_ms={}", retry.as_millis()).into();
            }
            Close::Unauthorized => "The app token is missing or not valid.",
            Close::UnknownSession => "There is no such session; register again.",
            Close::AlreadyConnected => "Another bridge of this session is connected.",
            Close::Replaced => "A newer bridge of this session took over, because this one was silent.",
            Close::Silent => "No frame arrived for two ping intervals.",
            Close::Stalled => "The app did not read what was sent to it.",
            Close::TooLarge => "A message was larger than allowed.",
            Close::TooSlow => "A message took too long to arrive.",
            Close::NoRoom => "There is no room in memory for a message now; connect again.",
        })
    }
}

/// How long an app should wait before it comes back, if the reason of a close frame says so.
pub fn retry_of(reason: &str) -> Option<Duration> {
    let (_, number) = reason.rsplit_once("retry_ms=")?;
    number.parse().ok().map(Duration::from_millis)
}

/// `ping`, the proxy's question whether the app is alive.
pub const PING: &str = r#"{"type":"ping"}"#;

/// A tools/call on its way to an app.
#[derive(Debug, Clone, Copy)]
pub struct Invoke<'a> {
    /// The session.
    pub session: SessionId,
    /// The number of the call within the session's whole life.
    pub number: u64,
    /// The tool's name, decoded.
    pub tool: &'a str,
    /// The arguments' text, as the client wrote it.
    pub arguments: &'a str,
    /// Whether the client wants progress, and the app can tell it.
    pub progress: bool,
    /// What the app learns of the caller, if it opted in to `context`.
    pub context: Option<Context<'a>>,
}

/// The caller of a tool, as its app may know it. Each member is JSON text.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context<'a> {
    /// The client's `{name, version, …}`.
    pub client_info: Option<&'a str>,
    /// The protocol version of the call.
    pub protocol_version: &'a str,
    /// The request's `_meta`, MCP's own keys included; they are left out of the frame.
    pub meta: Option<&'a str>,
    /// Where the call comes from, as far as `meta` does not say it.
    pub trace: TraceMembers<'a>,
    /// The client's capabilities.
    pub client_capabilities: Option<&'a str>,
    /// Answers to an earlier `input_required` result.
    pub input_responses: Option<&'a str>,
    /// The state of an earlier `input_required` result.
    pub request_state: Option<&'a str>,
}

/// Members of `invoke_tool.meta` that do not come from `_meta`. Each is text.
#[derive(Debug, Clone, Copy, Default)]
pub struct TraceMembers<'a> {
    /// The span in which the app is called.
    pub traceparent: Option<&'a str>,
    /// What tracing systems remember of its trace.
    pub tracestate: Option<&'a str>,
    /// What the client's own program remembers.
    pub baggage: Option<&'a str>,
    /// The members of `_meta` that give way.
    pub instead_of: &'a [&'a str],
}

impl TraceMembers<'_> {
    fn members(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [("traceparent", self.traceparent), ("tracestate", self.tracestate), ("baggage", self.baggage)];
        all.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }

    fn is_empty(&self) -> bool {
        self.members().next().is_none()
    }
}

impl Invoke<'_> {
    /// Writes the `invoke_tool` frame without its closing brace, so that what depends on the moment of sending
    /// ([`finish_invoke`]) can still be added.
    pub fn write(&self, spelling: Spelling) -> Vec<u8> {
        let (request_id, tool_name) = match spelling {
            Spelling::Snake => ("request_id", "tool_name"),
            Spelling::Camel => ("requestId", "toolName"),
        };
        let mut out = Vec::with_capacity(self.arguments.len() + self.tool.len() + 224);
        let id = self.session.digits();
        let mut number = itoa::Buffer::new();
        let head: [&[u8]; 11] = [
            b"{\"type\":\"invoke_tool\",\"mcpSessionId\":\"",
            &id,
            b"\",\"",
            request_id.as_bytes(),
            b"\":\"",
            &id,
            b":",
            number.format(self.number).as_bytes(),
            b"\",\"",
            tool_name.as_bytes(),
            b"\":",
        ];
        head.into_iter().for_each(|piece| out.extend_from_slice(piece));
        json::push_string(&mut out, self.tool);
        push_member(&mut out, "arguments", self.arguments);
        if self.progress {
            push_member(&mut out, "progress", "true");
        }
        if let Some(context) = &self.context {
            context.write(&mut out, spelling);
        }
        out
    }
}

impl Context<'_> {
    fn write(&self, out: &mut Vec<u8>, spelling: Spelling) {
        let name = |snake, camel| if spelling == Spelling::Snake { snake } else { camel };
        let info = |member| self.client_info.and_then(|info| json::member(info, member)).unwrap_or("null");
        out.extend_from_slice(b",\"client\":{\"name\":");
        out.extend_from_slice(info("name").as_bytes());
        push_member(out, "version", info("version"));
        out.extend_from_slice(b",\"");
        out.extend_from_slice(name("protocol_version", "protocolVersion").as_bytes());
        out.extend_from_slice(b"\":");
        json::push_string(out, self.protocol_version);
        out.push(b'}');
        if self.meta.is_some() || !self.trace.is_empty() {
            out.extend_from_slice(b",\"meta\":{");
            let mut separator: &[u8] = b"";
            let mut push_name = |out: &mut Vec<u8>, name: &str| {
                out.extend_from_slice(std::mem::replace(&mut separator, b","));
                json::push_string(out, name);
                out.push(b':');
            };
            // The reader has checked the text, so walking it again cannot fail.
            let _checked = json::members(self.meta.unwrap_or("{}"), |key, value| {
                let is_protocol = key == "progressToken" || key.starts_with(crate::jsonrpc::META_PREFIX);
                if !is_protocol && !self.trace.instead_of.contains(&key) {
                    push_name(out, key);
                    out.extend_from_slice(value.as_bytes());
                }
            });
            for (name, value) in self.trace.members() {
                push_name(out, name);
                json::push_string(out, value);
            }
            out.push(b'}');
        }
        let rest = [
            (name("client_capabilities", "clientCapabilities"), self.client_capabilities),
            (name("input_responses", "inputResponses"), self.input_responses),
            (name("request_state", "requestState"), self.request_state),
        ];
        for (name, value) in rest {
            if let Some(value) = value {
                push_member(out, name, value);
            }
        }
    }
}

/// Ends an `invoke_tool` frame; `timeout_ms` is what is left of the call's time.
pub fn finish_invoke(frame: &mut Vec<u8>, spelling: Spelling, timeout_ms: Option<u128>) {
    if let Some(timeout_ms) = timeout_ms {
        let name = if spelling == Spelling::Snake { "timeout_ms" } else { "timeoutMs" };
        push_member(frame, name, &timeout_ms.to_string());
    }
    frame.push(b'}');
}

/// Marks an open `invoke_tool` frame as sent again, because the app said that it never saw the call.
pub fn mark_redelivery(frame: &mut Vec<u8>) {
    // It may be marked already.
    if !frame.ends_with(b",\"redelivery\":true") {
        push_member(frame, "redelivery", "true");
    }
}

/// A `hello` frame, the first on every bridge of an app that resumes calls. `pending` are the numbers of the calls
/// that an earlier socket has carried to the app, or may have.
pub fn hello_frame(
    session: SessionId,
    epoch: u64,
    instance: &str,
    grace: Duration,
    pending: impl Iterator<Item = u64>,
    spelling: Spelling,
) -> Vec<u8> {
    let grace_seconds = if spelling == Spelling::Snake { "grace_seconds" } else { "graceSeconds" };
    let grace = grace.as_secs_f64();
    let pending: Vec<String> = pending.map(|number| format!("\"{session}:{number}\"")).collect();
    let pending = pending.join(",");
    format!(
        r#"{{"type":"hello","mcpSessionId":"{session}","epoch":{epoch},"instance":"{instance}","{grace_seconds}":{grace},"pending":[{pending}]}}"#
    )
    .into_bytes()
}

fn push_member(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
    out.extend_from_slice(value.as_bytes());
}

/// Why a call ended without the app: what `cancel_tool` tells the app.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelReason {
    /// The client sent `notifications/cancelled`.
    Cancelled,
    /// The call's time was over.
    Timeout,
    /// The client's connection closed.
    ClientDisconnected,
    /// The session was deleted.
    SessionDeleted,
}

impl CancelReason {
    fn as_str(self) -> &'static str {
        match self {
            CancelReason::Cancelled => "cancelled",
            CancelReason::Timeout => "timeout",
            CancelReason::ClientDisconnected => "client_disconnected",
            CancelReason::SessionDeleted => "session_deleted",
        }
    }
}

/// A `cancel_tool` frame.
pub fn cancel_frame(session: SessionId, number: u64, reason: CancelReason, spelling: Spelling) -> Vec<u8> {
    let request_id = if spelling == Spelling::Snake { "request_id" } else { "requestId" };
    let reason = reason.as_str();
    format!(
        r#"{{"type":"cancel_tool","mcpSessionId":"{session}","{request_id}":"{session}:{number}","reason":"{reason}"}}"#
    )
    .into_bytes()
}

/// An `error` frame: what was wrong with a frame of the app's.
pub fn error_frame(message: &str) -> Vec<u8> {
    let mut out = br#"{"type":"error","message":"#.to_vec();
    json::push_string(&mut out, message);
    out.push(b'}');
    out
}

/// A frame from an app. JSON values are slices of the frame's text.
#[derive(Debug, PartialEq)]
pub enum FromApp<'a> {
    /// The app is alive.
    Pong,
    /// The app answers a call.
    Result {
        /// Which call.
        call: CallRef<'a>,
        /// What it answered.
        answer: Answer<'a>,
    },
    /// The app tells how far a call has got.
    Progress {
        /// Which call.
        call: CallRef<'a>,
        /// `{progress, total?, message?}`.
        progress: Progress<'a>,
    },
    /// The app changes its tools; the text of the new array.
    UpdateTools {
        /// The array's text.
        tools: &'a str,
    },
}

/// How a frame of the app's names a call. Both must fit the bridge's session and a call that is in flight.
#[derive(Debug, PartialEq)]
pub struct CallRef<'a> {
    /// `mcpSessionId`, if it was given.
    pub session: Option<Cow<'a, str>>,
    /// `request_id`.
    pub request_id: Cow<'a, str>,
}

impl<'a> CallRef<'a> {
    /// Finds the call that a broken frame names: a request id of `session` that stands in it as the value of
    /// `request_id`, or else as any string. `None` if there are several.
    pub fn find(text: &'a str, session: SessionId) -> Option<Self> {
        let prefix = format!("\"{session}:");
        let mut named = [None, None];
        for (at, _) in text.match_indices(&prefix) {
            let request_id = text[at + 1..].split('"').next()?;
            let key = text[..at].trim_end().strip_suffix(':').map_or("", str::trim_end);
            let is_member = key.ends_with("\"request_id\"") || key.ends_with("\"requestId\"");
            let slot = &mut named[usize::from(!is_member)];
            *slot = match *slot {
                Some(Some(other)) if other != request_id => Some(None),
                _ => Some(Some(request_id)),
            };
        }
        let [by_member, by_any] = named;
        let request_id = by_member.or(by_any)??;
        Some(CallRef { session: None, request_id: Cow::Borrowed(request_id) })
    }

    /// The call's number within `session`; `None` if the frame means another session's call, or none.
    pub fn number_in(&self, session: SessionId) -> Option<u64> {
        let id = session.digits();
        if self.session.as_deref().is_some_and(|given| given.as_bytes() != id) {
            return None;
        }
        let (prefix, number) = self.request_id.split_at_checked(id.len())?;
        (prefix.as_bytes() == id).then(|| call_number(number.strip_prefix(':')?)).flatten()
    }
}

/// Reads the number of a call exactly as we write it.
pub fn call_number(text: &str) -> Option<u64> {
    let is_ours = text == "0" || text.starts_with(|first: char| matches!(first, '1'..='9'));
    text.parse().ok().filter(|_| is_ours)
}

/// What an `invoke_result` says.
#[derive(Debug, PartialEq)]
pub enum Answer<'a> {
    /// `ok:true` with `content`, any JSON; absent or null is `{}`.
    Content(&'a str),
    /// `result`: a whole MCP CallToolResult.
    Result(&'a str),
    /// `ok:false` with the text of `error`.
    Failed(Cow<'a, str>),
    /// `ok:false` with `error: {code, message, data}` whose code is an integer.
    RpcError {
        /// The JSON-RPC error code.
        code: i64,
        /// Its message.
        message: Cow<'a, str>,
        /// Its data, as text.
        data: Option<&'a str>,
    },
    /// `ok:false` with an `error.code` of `unknown_request`: the app never saw the call.
    UnknownRequest,
}

/// The text of the numbers and the message of a `tool_progress`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress<'a> {
    /// How far, as text of a number.
    pub progress: &'a str,
    /// Of how much.
    pub total: Option<&'a str>,
    /// The text of a JSON string.
    pub message: Option<&'a str>,
}

impl Progress<'_> {
    /// How many bytes it takes.
    pub fn size(&self) -> usize {
        self.progress.len() + self.total.map_or(0, str::len) + self.message.map_or(0, str::len)
    }
}

/// What an app is told when it fails a call without a reason.
const DEFAULT_ERROR: &str = "Tool call failed.";

/// Why a frame is not valid: a sentence for the app's developer.
#[derive(Debug, PartialEq)]
pub struct BadFrame<'a> {
    /// What is wrong.
    pub message: String,
    /// The call that the frame was meant to answer: it fails, for it would wait in vain. Other frames concern no
    /// result, and newer apps may send kinds that are not known here.
    pub call: Option<CallRef<'a>>,
    /// The frame could not be read to its end, so it may answer a call that it names somewhere.
    pub is_unreadable: bool,
}

impl<'a> FromApp<'a> {
    /// Parses a frame.
    ///
    /// # Errors
    /// [`BadFrame`] says what is wrong with it.
    pub fn parse(text: &'a str, max_depth: usize) -> Result<Self, BadFrame<'a>> {
        let mut draft = Draft::default();
        match draft.read(text, max_depth) {
            Ok(()) => draft.finish(),
            Err(error) => {
                let message = format!("The frame is refused: {error}.");
                Err(BadFrame { message, call: draft.call(), is_unreadable: true })
            }
        }
    }
}

#[derive(Default)]
struct Draft<'a> {
    kind: Option<&'a str>,
    session: Option<&'a str>,
    request_id: Option<&'a str>,
    ok: Option<&'a str>,
    content: Option<&'a str>,
    result: Option<&'a str>,
    error: Option<&'a str>,
    progress: Option<&'a str>,
    total: Option<&'a str>,
    message: Option<&'a str>,
    tools: Option<&'a str>,
}

impl<'a> Draft<'a> {
    fn read(&mut self, text: &'a str, max_depth: usize) -> Result<(), JsonError> {
        let mut reader = Reader::new(text, max_depth);
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            let value = reader.value()?;
            let slot = match &*key {
                "type" => &mut self.kind,
                "mcpSessionId" | "mcp_session_id" => &mut self.session,
                "request_id" | "requestId" => &mut self.request_id,
                "ok" => &mut self.ok,
                "content" => &mut self.content,
                "result" => &mut self.result,
                "error" => &mut self.error,
                "progress" => &mut self.progress,
                "total" => &mut self.total,
                "message" => &mut self.message,
                "tools" => &mut self.tools,
                _ => continue,
            };
            // Two readers could take different ones for the call that is meant.
            if value != "null" && slot.replace(value).is_some_and(|other| other != value) {
                return Err(JsonError::Kind { at: reader.mark(), what: "a member is given twice" });
            }
        }
        reader.end()
    }

    fn call(&self) -> Option<CallRef<'a>> {
        let session = match self.session {
            Some(session) => Some(json::as_string(session)?),
            None => None,
        };
        Some(CallRef { session, request_id: json::as_string(self.request_id?)? })
    }

    fn finish(self) -> Result<FromApp<'a>, BadFrame<'a>> {
        let bad = |message: &str| Err(BadFrame { message: message.to_owned(), call: None, is_unreadable: false });
        let Some(kind) = self.kind.and_then(json::as_string) else {
            return bad("The frame's 'type' must be a string.");
        };
        match &*kind {
            "pong" => Ok(FromApp::Pong),
            "invoke_result" => {
                let Some(call) = self.call() else {
                    return bad("invoke_result: 'request_id' must be a string.");
                };
                self.answer().map_or_else(
                    |error| {
                        let message = format!("invoke_result: {error}");
                        Err(BadFrame { message, call: self.call(), is_unreadable: false })
                    },
                    |answer| Ok(FromApp::Result { call, answer }),
                )
            }
            "tool_progress" => {
                let is_number = |text: &str| text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
                let Some(call) = self.call() else {
                    return bad("tool_progress: 'request_id' must be a string.");
                };
                let Some(progress) = self.progress.filter(|text| is_number(text)) else {
                    return bad("tool_progress: 'progress' must be a number.");
                };
                if self.total.is_some_and(|text| !is_number(text)) {
                    return bad("tool_progress: 'total' must be a number.");
                }
                if self.message.is_some_and(|text| !json::is_string(text)) {
                    return bad("tool_progress: 'message' must be a string.");
                }
                Ok(FromApp::Progress {
                    call,
                    progress: Progress { progress, total: self.total, message: self.message },
                })
            }
            "update_tools" => match self.tools {
                Some(tools) if tools.starts_with('[') => Ok(FromApp::UpdateTools { tools }),
                _ => bad("update_tools: 'tools' must be an array."),
            },
            _ => bad("The frame's 'type' is not known."),
        }
    }

    fn answer(&self) -> Result<Answer<'a>, &'static str> {
        if let Some(result) = self.result {
            return Ok(Answer::Result(result));
        }
        match self.ok {
            Some("true") => return Ok(Answer::Content(self.content.unwrap_or("{}"))),
            Some("false") => {}
            _ => return Err("'ok' must be true or false."),
        }
        let Some(error) = self.error else { return Ok(Answer::Failed(DEFAULT_ERROR.into())) };
        if let Some(text) = json::as_string(error) {
            return Ok(Answer::Failed(text));
        }
        if !json::is_object(error) {
            return Err("'error' must be a string or an object.");
        }
        let (mut code, mut message, mut data) = (None, None, None);
        let read = json::members(error, |key, value| match key {
            "code" => code = Some(value),
            "message" => message = json::as_string(value),
            "data" => data = Some(value),
            _ => {}
        });
        debug_assert!(read.is_ok(), "the frame has been checked");
        let message = message.unwrap_or(DEFAULT_ERROR.into());
        match code {
            Some("\"unknown_request\"") => Ok(Answer::UnknownRequest),
            Some(code) if !json::is_string(code) && code != "null" => match code.parse() {
                Ok(code) => Ok(Answer::RpcError { code, message, data }),
                Err(_) => Err("'error.code' must be an integer or a string."),
            },
            _ => Ok(Answer::Failed(message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: &str = "0123456789abcdef0123456789abcdef";

    fn session() -> SessionId {
        SessionId::parse(S).unwrap()
    }

    #[test]
    fn session_ids_are_read_exactly_as_written() {
        let id = SessionId::random();
        assert_eq!(SessionId::parse(&id.to_string()), Some(id));
        assert_eq!(session().short().to_string(), "01234567");
        for other in [
            "",
            "0",
            &S.to_uppercase(),
            &format!("{S}0"),
            &format!("+{}", &S[1..]),
            "../../../../../../../../etc/passwd",
        ] {
            assert_eq!(SessionId::parse(other), None, "{other}");
        }
    }

    #[test]
    fn members_about_the_trace_stand_beside_or_instead_of_those_of_the_client() {
        let meta = |meta, trace| {
            let mut out = Vec::new();
            Context { meta, trace, ..Context::default() }.write(&mut out, Spelling::Snake);
            json::member(&format!("{{{}}}", &String::from_utf8(out).unwrap()[1..]), "meta").map(str::to_owned)
        };
        let span = TraceMembers { traceparent: Some("s"), ..TraceMembers::default() };
        let both = TraceMembers { tracestate: Some("a=\""), baggage: Some("b"), ..span };
        assert_eq!(meta(None, TraceMembers::default()), None);
        assert_eq!(meta(None, both).unwrap(), r#"{"traceparent":"s","tracestate":"a=\"","baggage":"b"}"#);
        let theirs = Some(r#"{ "tracestate": "x","traceparent":"c", "n": 1E2}"#);
        assert_eq!(meta(theirs, TraceMembers::default()).unwrap(), r#"{"tracestate":"x","traceparent":"c","n":1E2}"#);
        let instead = TraceMembers { instead_of: &["traceparent"], ..span };
        assert_eq!(meta(theirs, instead).unwrap(), r#"{"tracestate":"x","n":1E2,"traceparent":"s"}"#);
    }

    #[test]
    fn invoke_frames_keep_the_arguments_and_follow_the_spelling() {
        let invoke = Invoke {
            session: session(),
            number: 7,
            tool: "a\"b",
            arguments: r#"{ "n":1E2}"#,
            progress: false,
            context: None,
        };
        let mut frame = invoke.write(Spelling::Snake);
        finish_invoke(&mut frame, Spelling::Snake, None);
        let expected = format!(
            r#"{{"type":"invoke_tool","mcpSessionId":"{S}","request_id":"{S}:7","tool_name":"a\"b","arguments":{{ "n":1E2}}}}"#
        );
        assert_eq!(String::from_utf8(frame).unwrap(), expected);
        let context = Context {
            client_info: Some(r#"{"name":"c","version":"1"}"#),
            protocol_version: "2026-07-28",
            meta: Some(r#"{"progressToken":1,"traceparent":"00","io.modelcontextprotocol/clientInfo":{}}"#),
            trace: TraceMembers::default(),
            client_capabilities: Some("{}"),
            request_state: Some("\"s\""),
            input_responses: None,
        };
        let mut frame = Invoke { progress: true, context: Some(context), ..invoke }.write(Spelling::Camel);
        finish_invoke(&mut frame, Spelling::Camel, Some(1500));
        let expected = format!(
            r#"{{"type":"invoke_tool","mcpSessionId":"{S}","requestId":"{S}:7","toolName":"a\"b","arguments":{{ "n":1E2}},"progress":true,"client":{{"name":"c","version":"1","protocolVersion":"2026-07-28"}},"meta":{{"traceparent":"00"}},"clientCapabilities":{{}},"requestState":"s","timeoutMs":1500}}"#
        );
        assert_eq!(String::from_utf8(frame).unwrap(), expected);
    }

    #[test]
    fn results_are_read_in_both_spellings() {
        for text in [
            format!(
                r#"{{"type":"invoke_result","mcpSessionId":"{S}","request_id":"{S}:3","ok":true,"content":{{"a":1.0}}}}"#
            ),
            format!(r#"{{"content":{{"a":1.0}},"ok":true,"requestId":"{S}:3","type":"invoke_result","extra":[]}}"#),
        ] {
            let Ok(FromApp::Result { call, answer }) = FromApp::parse(&text, 64) else { panic!("{text}") };
            assert_eq!(call.number_in(session()), Some(3));
            assert_eq!(call.number_in(SessionId::random()), None);
            assert_eq!(answer, Answer::Content(r#"{"a":1.0}"#));
        }
    }

    #[test]
    fn a_call_is_named_exactly_as_we_named_it() {
        for (number, expected) in
            [("7", Some(7)), ("+7", None), ("07", None), ("", None), ("-0", None), ("18446744073709551616", None)]
        {
            let call = CallRef { session: None, request_id: format!("{S}:{number}").into() };
            assert_eq!(call.number_in(session()), expected, "{number}");
        }
    }

    #[test]
    fn every_kind_of_answer_is_told_apart() {
        let parse = |rest: &str| {
            let text = format!(r#"{{"type":"invoke_result","request_id":"{S}:1",{rest}}}"#);
            match FromApp::parse(&text, 64) {
                Ok(FromApp::Result { answer, .. }) => Ok(format!("{answer:?}")),
                Err(bad) => {
                    assert_eq!(bad.call.unwrap().number_in(session()), Some(1));
                    Err(bad.message)
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(parse(r#""ok":true"#).unwrap(), r#"Content("{}")"#);
        assert_eq!(parse(r#""ok":true,"content":null"#).unwrap(), r#"Content("{}")"#);
        assert_eq!(parse(r#""ok":true,"content":[1]"#).unwrap(), r#"Content("[1]")"#);
        assert_eq!(parse(r#""result":{"content":[]}"#).unwrap(), r#"Result("{\"content\":[]}")"#);
        assert_eq!(parse(r#""ok":false"#).unwrap(), r#"Failed("Tool call failed.")"#);
        assert_eq!(parse(r#""ok":false,"error":"no""#).unwrap(), r#"Failed("no")"#);
        assert_eq!(parse(r#""ok":false,"error":{"code":"busy","message":"m"}"#).unwrap(), r#"Failed("m")"#);
        assert_eq!(parse(r#""ok":false,"error":{"code":"unknown_request"}"#).unwrap(), "UnknownRequest");
        assert_eq!(
            parse(r#""ok":false,"error":{"code":-32021,"message":"m","data":{"x":1}}"#).unwrap(),
            r#"RpcError { code: -32021, message: "m", data: Some("{\"x\":1}") }"#
        );
        for bad in [r#""ok":1"#, r#""content":1"#, r#""ok":false,"error":7"#, r#""ok":false,"error":{"code":1.5}"#] {
            parse(bad).unwrap_err();
        }
        assert!(parse(r#""ok":true,"content":1e400"#).unwrap_err().contains("double"));
    }

    #[test]
    fn an_unreadable_frame_is_traced_to_the_call_that_it_answers() {
        let found = |text: &str| CallRef::find(text, session()).and_then(|call| call.number_in(session()));
        assert_eq!(found(&format!(r#"{{"request_id":"{S}:7","content":1e400}}"#)), Some(7));
        assert_eq!(found(&format!(r#"{{"content":["{S}:1",1e400],"requestId" : "{S}:2"}}"#)), Some(2));
        assert_eq!(found(&format!(r#"{{"content":"{S}:1"}}"#)), Some(1));
        assert_eq!(found(&format!(r#"{{"content":["{S}:1","{S}:2"]}}"#)), None);
        assert_eq!(found(&format!(r#"{{"request_id":"{S}:1","request_id":"{S}:2"}}"#)), None);
        assert_eq!(found(r#"{"request_id":"0123456789abcdef0123456789abcdee:7"}"#), None);
    }

    #[test]
    fn bad_frames_are_told_what_is_wrong() {
        for bad in [
            "",
            "[]",
            "1",
            "{}",
            r#"{"type":1}"#,
            r#"{"type":"x"}"#,
            r#"{"type":"invoke_result","ok":true}"#,
            r#"{"type":"update_tools","tools":{}}"#,
            r#"{"type":"tool_progress","request_id":"x","progress":"1"}"#,
        ] {
            assert!(!FromApp::parse(bad, 64).unwrap_err().message.is_empty(), "{bad}");
        }
    }

    #[test]
    fn close_reasons_fit_a_control_frame() {
        for close in [
            Close::Deleted,
            Close::Policy,
            Close::Restart { retry: Duration::from_millis(u64::MAX) },
            Close::Unauthorized,
            Close::UnknownSession,
            Close::AlreadyConnected,
            Close::Replaced,
            Close::Silent,
            Close::Stalled,
        ] {
            assert!(close.reason().len() <= 123);
        }
    }

    #[test]
    fn a_reason_tells_when_to_come_back() {
        let retry = Duration::from_millis(1250);
        assert_eq!(retry_of(&Close::Restart { retry }.reason()), Some(retry));
        for other in ["", "retry_ms=", "retry_ms=-1", "retry_ms=1 or so", "retry"] {
            assert_eq!(retry_of(other), None, "{other}");
        }
    }
}
