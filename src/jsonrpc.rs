//! The JSON-RPC 2.0 envelope, parsed once and borrowed from the body.
//!
//! Ids and params stay the text that the client wrote: `9007199254740993`, `1.0` and `1E2` come back as sent.
//! The same pass picks out the few members of `params` that MCP methods act on, so no part of a body is read twice.

use std::borrow::Cow;

use crate::json::{self, JsonError, Reader};

/// Invalid JSON was received.
pub const PARSE_ERROR: i64 = -32700;
/// The JSON is not a valid request object.
pub const INVALID_REQUEST: i64 = -32600;
/// The method does not exist here.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// The method's parameters are invalid.
pub const INVALID_PARAMS: i64 = -32602;

/// The longest id, and the longest progress token, that is accepted, in bytes of its text. They are echoed, and kept
/// while a call is in flight.
pub const MAX_ID_BYTES: usize = 1024;

/// One JSON-RPC message from a client.
#[derive(Debug)]
pub enum Message<'a> {
    /// Has a method and an id: wants an answer.
    Request {
        /// The id as the client wrote it: the text of a string, or of a whole number.
        id: &'a str,
        /// The method, decoded.
        method: Cow<'a, str>,
        /// What it came with.
        params: Params<'a>,
    },
    /// Has a method and no id: is never answered.
    Notification {
        /// The method, decoded.
        method: Cow<'a, str>,
        /// What it came with.
        params: Params<'a>,
    },
    /// An answer to a request that we never made.
    Response,
}

/// The members of `params` that some MCP method reads, each as its own text. Absent and `null` are both `None`.
#[derive(Debug, Default)]
pub struct Params<'a> {
    /// tools/call: the tool's name.
    pub name: Option<&'a str>,
    /// tools/call: the arguments.
    pub arguments: Option<&'a str>,
    /// tools/list: the page that is asked for.
    pub cursor: Option<&'a str>,
    /// initialize: the version that the client offers.
    pub protocol_version: Option<&'a str>,
    /// initialize: the client's name and version.
    pub client_info: Option<&'a str>,
    /// notifications/cancelled: the id of the request to cancel, if it is one that a request can have.
    pub request_id: Option<&'a str>,
    /// tools/call: answers to an earlier `input_required` result.
    pub input_responses: Option<&'a str>,
    /// tools/call: the state that came with an earlier `input_required` result.
    pub request_state: Option<&'a str>,
    /// subscriptions/listen: what to notify of.
    pub notifications: Option<&'a str>,
    /// Any method: the request's metadata.
    pub meta: Option<Meta<'a>>,
}

/// The members of `params._meta` that the protocol defines, and the whole of it.
#[derive(Debug, Default)]
pub struct Meta<'a> {
    /// The whole `_meta` object.
    pub text: &'a str,
    /// `progressToken`.
    pub progress_token: Option<&'a str>,
    /// `io.modelcontextprotocol/protocolVersion`.
    pub protocol_version: Option<&'a str>,
    /// `io.modelcontextprotocol/clientCapabilities`.
    pub client_capabilities: Option<&'a str>,
    /// `io.modelcontextprotocol/clientInfo`.
    pub client_info: Option<&'a str>,
}

/// The prefix of the `_meta` keys that belong to MCP itself.
pub const META_PREFIX: &str = "io.modelcontextprotocol/";

/// Why a text is no JSON-RPC message.
#[derive(Debug)]
pub struct Invalid<'a> {
    /// The id to answer with, if it could be known.
    pub id: Option<&'a str>,
    /// [`PARSE_ERROR`], [`INVALID_REQUEST`] or [`INVALID_PARAMS`].
    pub code: i64,
    /// A sentence for the client's developer.
    pub message: String,
    /// Whether it is nested too deeply.
    pub is_too_deep: bool,
}

impl<'a> Invalid<'a> {
    fn new(id: Option<&'a str>, code: i64, message: String) -> Self {
        Invalid { id, code, message, is_too_deep: false }
    }
}

impl<'a> Message<'a> {
    /// Parses one message.
    ///
    /// # Errors
    /// [`Invalid`], ready to be answered.
    pub fn parse(text: &'a str, max_depth: usize) -> Result<Self, Invalid<'a>> {
        let mut draft = Draft::default();
        match draft.read(text, max_depth) {
            Ok(()) => draft.finish(),
            Err(Fault::Json(error)) => {
                let code = match error {
                    JsonError::Syntax { .. } | JsonError::Kind { .. } => PARSE_ERROR,
                    // Readable, but more than we relay.
                    _ => INVALID_REQUEST,
                };
                let not_an_object = !text.trim_start().starts_with('{') && json::check(text, max_depth).is_ok();
                if not_an_object {
                    return Err(Invalid::new(None, INVALID_REQUEST, "A request is a JSON object.".into()));
                }
                let id = draft.known_id().or_else(|| match error {
                    JsonError::Syntax { .. } => None,
                    // The text is whole, and many clients write the id last.
                    _ => trailing_id(text),
                });
                let is_too_deep = matches!(error, JsonError::TooDeep { .. });
                Err(Invalid { id, code, message: format!("{error}."), is_too_deep })
            }
            Err(Fault::Duplicate(name)) => {
                let id = if name == "id" { None } else { draft.known_id() };
                Err(Invalid::new(id, INVALID_REQUEST, format!("The member '{name}' is given twice.")))
            }
        }
    }
}

enum Fault {
    Json(JsonError),
    Duplicate(&'static str),
}

impl From<JsonError> for Fault {
    fn from(error: JsonError) -> Self {
        Fault::Json(error)
    }
}

/// What one pass over the text has found so far.
#[derive(Default)]
struct Draft<'a> {
    jsonrpc: Option<&'a str>,
    id: Option<&'a str>,
    method: Option<&'a str>,
    params: Params<'a>,
    params_are_no_object: bool,
    has_params: bool,
    is_response: bool,
}

impl<'a> Draft<'a> {
    fn read(&mut self, text: &'a str, max_depth: usize) -> Result<(), Fault> {
        let mut reader = Reader::new(text, max_depth);
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            match &*key {
                "jsonrpc" => set("jsonrpc", &mut self.jsonrpc, reader.value()?)?,
                "id" => set("id", &mut self.id, reader.value()?)?,
                "method" => set("method", &mut self.method, reader.value()?)?,
                "params" => {
                    if std::mem::replace(&mut self.has_params, true) {
                        return Err(Fault::Duplicate("params"));
                    }
                    if reader.peek() == Some(b'{') {
                        self.read_params(&mut reader)?;
                    } else {
                        self.params_are_no_object = reader.value()? != "null";
                    }
                }
                "result" | "error" => {
                    self.is_response = true;
                    reader.value()?;
                }
                _ => {
                    reader.value()?;
                }
            }
        }
        Ok(reader.end()?)
    }

    fn read_params(&mut self, reader: &mut Reader<'a>) -> Result<(), Fault> {
        let params = &mut self.params;
        let mut seen_meta = false;
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            let (name, slot) = match &*key {
                "name" => ("params.name", &mut params.name),
                "arguments" => ("params.arguments", &mut params.arguments),
                "cursor" => ("params.cursor", &mut params.cursor),
                "protocolVersion" => ("params.protocolVersion", &mut params.protocol_version),
                "clientInfo" => ("params.clientInfo", &mut params.client_info),
                "requestId" => ("params.requestId", &mut params.request_id),
                "inputResponses" => ("params.inputResponses", &mut params.input_responses),
                "requestState" => ("params.requestState", &mut params.request_state),
                "notifications" => ("params.notifications", &mut params.notifications),
                "_meta" => {
                    if std::mem::replace(&mut seen_meta, true) {
                        return Err(Fault::Duplicate("params._meta"));
                    }
                    if reader.peek() == Some(b'{') {
                        params.meta = Some(read_meta(reader)?);
                    } else {
                        reader.value()?;
                    }
                    continue;
                }
                _ => {
                    reader.value()?;
                    continue;
                }
            };
            set(name, slot, reader.value()?)?;
        }
        for slot in [
            &mut params.name,
            &mut params.arguments,
            &mut params.cursor,
            &mut params.request_id,
            &mut params.input_responses,
            &mut params.request_state,
            &mut params.notifications,
        ] {
            if *slot == Some("null") {
                *slot = None;
            }
        }
        params.request_id = params.request_id.filter(|id| check_id(id).is_ok());
        Ok(())
    }

    fn known_id(&self) -> Option<&'a str> {
        self.id.filter(|id| check_id(id).is_ok())
    }

    fn finish(self) -> Result<Message<'a>, Invalid<'a>> {
        let id = self.known_id();
        let invalid = |code, message: String| Err(Invalid::new(id, code, message));
        if self.jsonrpc != Some("\"2.0\"") {
            return invalid(INVALID_REQUEST, "The member 'jsonrpc' must be \"2.0\".".into());
        }
        let Some(method) = self.method else {
            if self.is_response {
                return Ok(Message::Response);
            }
            return invalid(INVALID_REQUEST, "The member 'method' is missing.".into());
        };
        let Some(method) = json::as_string(method) else {
            return invalid(INVALID_REQUEST, "The member 'method' must be a string.".into());
        };
        if let Some(Err(message)) = self.id.map(check_id) {
            return Err(Invalid::new(None, INVALID_REQUEST, message));
        }
        if self.params_are_no_object {
            return invalid(INVALID_PARAMS, "The member 'params' must be an object.".into());
        }
        Ok(match id {
            Some(id) => Message::Request { id, method, params: self.params },
            None => Message::Notification { method, params: self.params },
        })
    }
}

fn read_meta<'a>(reader: &mut Reader<'a>) -> Result<Meta<'a>, Fault> {
    let mut meta = Meta::default();
    let mark = reader.mark();
    reader.begin_object()?;
    while let Some(key) = reader.next_key()? {
        let slot = match &*key {
            "progressToken" => &mut meta.progress_token,
            "io.modelcontextprotocol/protocolVersion" => &mut meta.protocol_version,
            "io.modelcontextprotocol/clientCapabilities" => &mut meta.client_capabilities,
            "io.modelcontextprotocol/clientInfo" => &mut meta.client_info,
            _ => {
                reader.value()?;
                continue;
            }
        };
        set("a key of params._meta", slot, reader.value()?)?;
    }
    meta.text = reader.since(mark);
    Ok(meta)
}

fn set<'a>(name: &'static str, slot: &mut Option<&'a str>, value: &'a str) -> Result<(), Fault> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(Fault::Duplicate(name)),
    }
}

/// The id, if it is the last member of a message that could not be read to its end.
fn trailing_id(text: &str) -> Option<&str> {
    let members = text.trim_end().strip_suffix('}')?;
    let (before, value) = members.rsplit_once("\"id\"")?;
    let value = value.trim_start().strip_prefix(':')?.trim();
    let is_member = before.trim_end().ends_with([',', '{']);
    (is_member && json::check(value, 1).is_ok() && check_id(value).is_ok()).then_some(value)
}

/// JSON-RPC 2.0 section 4 and MCP: a string or a whole number, never null.
fn check_id(id: &str) -> Result<(), String> {
    if id.len() > MAX_ID_BYTES {
        return Err(format!("The id is {} bytes long; the limit is {MAX_ID_BYTES}.", id.len()));
    }
    match id.as_bytes()[0] {
        b'"' => Ok(()),
        b'-' | b'0'..=b'9' if json::is_whole_number(id) => Ok(()),
        _ => Err("The id must be a string or a whole number.".into()),
    }
}

/// `{"jsonrpc":"2.0","id":…,"result":` — append the result and a closing brace.
pub fn result_prefix(id: &str, capacity: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(capacity + id.len() + 40);
    out.extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":");
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(b",\"result\":");
    out
}

/// A whole response that carries `result`, the text of a JSON value.
pub fn result(id: &str, result: &[u8]) -> Vec<u8> {
    let mut out = result_prefix(id, result.len());
    out.extend_from_slice(result);
    out.push(b'}');
    out
}

/// A whole error response. `id` is left out when it cannot be known; `data` is the text of a JSON value.
pub fn error(id: Option<&str>, code: i64, message: &str, data: Option<&str>) -> Vec<u8> {
    let mut out = b"{\"jsonrpc\":\"2.0\",".to_vec();
    if let Some(id) = id {
        out.extend_from_slice(b"\"id\":");
        out.extend_from_slice(id.as_bytes());
        out.push(b',');
    }
    out.extend_from_slice(b"\"error\":{\"code\":");
    out.extend_from_slice(code.to_string().as_bytes());
    out.extend_from_slice(b",\"message\":");
    json::push_string(&mut out, message);
    if let Some(data) = data {
        out.extend_from_slice(b",\"data\":");
        out.extend_from_slice(data.as_bytes());
    }
    out.extend_from_slice(b"}}");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> (&str, String) {
        match Message::parse(text, 64) {
            Ok(Message::Request { id, method, .. }) => (id, method.into_owned()),
            other => panic!("{text}: {other:?}"),
        }
    }

    fn refused(text: &str) -> (Option<String>, i64, String) {
        let invalid = Message::parse(text, 64).expect_err(text);
        (invalid.id.map(str::to_owned), invalid.code, invalid.message)
    }

    #[test]
    fn ids_keep_their_text() {
        for id in ["0", "\"\"", "-1", "9007199254740993", "1.0", "1e2", "\"\\u0041\"", "\"x\""] {
            let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
            assert_eq!(request(&text), (id, "ping".to_owned()));
        }
    }

    #[test]
    fn ids_that_json_rpc_forbids_are_refused() {
        for id in ["null", "1.5", "{}", "[1]", "true", "1e-1"] {
            let (echoed, code, _) = refused(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#));
            assert_eq!((echoed, code), (None, INVALID_REQUEST), "{id}");
        }
        let long = |n: usize| format!(r#"{{"jsonrpc":"2.0","id":"{}","method":"ping"}}"#, "x".repeat(n - 2));
        assert!(Message::parse(&long(MAX_ID_BYTES), 64).is_ok());
        assert!(refused(&long(MAX_ID_BYTES + 1)).2.contains("1025 bytes"));
    }

    #[test]
    fn a_cancellation_of_what_can_be_no_request_names_none() {
        let cancelled = |id: &str| {
            let text = format!(r#"{{"jsonrpc":"2.0","method":"c","params":{{"requestId":{id}}}}}"#);
            match Message::parse(&text, 64) {
                Ok(Message::Notification { params, .. }) => params.request_id.map(str::to_owned),
                other => panic!("{other:?}"),
            }
        };
        let long = |n: usize| format!("\"{}\"", "x".repeat(n - 2));
        for id in ["1", "\"1\"", "1e2", &long(MAX_ID_BYTES)] {
            assert_eq!(cancelled(id).as_deref(), Some(id));
        }
        for id in ["null", "{}", "[1]", "1.5", "true", &long(MAX_ID_BYTES + 1)] {
            assert_eq!(cancelled(id), None, "{id}");
        }
    }

    #[test]
    fn one_pass_finds_the_members_of_params() {
        let text = r#"{"params":{"_meta":{"progressToken":7,"io.modelcontextprotocol/protocolVersion":"2026-07-28","traceparent":"00"},
            "name":"a","arguments":{"x":[1,{"y":1E2}]},"cursor":null},"method":"tools/call","id":"i","jsonrpc":"2.0"}"#;
        let Ok(Message::Request { params, .. }) = Message::parse(text, 64) else { panic!() };
        assert_eq!(params.name, Some("\"a\""));
        assert_eq!(params.arguments, Some(r#"{"x":[1,{"y":1E2}]}"#));
        assert_eq!(params.cursor, None);
        let meta = params.meta.unwrap();
        assert_eq!(meta.progress_token, Some("7"));
        assert_eq!(meta.protocol_version, Some("\"2026-07-28\""));
        assert!(meta.text.starts_with("{\"progressToken\"") && meta.text.ends_with("\"00\"}"));
    }

    #[test]
    fn bad_envelopes_say_what_is_wrong_and_echo_the_id_if_they_can() {
        let cases = [
            ("", PARSE_ERROR, None),
            ("{", PARSE_ERROR, None),
            (r#"{"jsonrpc":"2.0","id":4,"method":"ping",}"#, PARSE_ERROR, Some("4")),
            ("[1]", INVALID_REQUEST, None),
            ("\"x\"", INVALID_REQUEST, None),
            (r#"{"id":3,"method":"ping"}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"1.0","id":3,"method":"ping"}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3,"method":1}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3,"method":"ping","params":[1]}"#, INVALID_PARAMS, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3,"id":4,"method":"ping"}"#, INVALID_REQUEST, None),
            (r#"{"jsonrpc":"2.0","id":3,"method":"a","method":"b"}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3,"method":"a","params":{"name":"a","name":"b"}}"#, INVALID_REQUEST, Some("3")),
            (r#"{"jsonrpc":"2.0","id":3,"method":"a","params":{"arguments":{"n":1e400}}}"#, INVALID_REQUEST, Some("3")),
            (r#"{"method":"a","params":{"n":1e400},"jsonrpc":"2.0","id": "x" } "#, INVALID_REQUEST, Some("\"x\"")),
            (r#"{"method":"a","params":{"s":"\ud83d"},"jsonrpc":"2.0","id":3}"#, INVALID_REQUEST, Some("3")),
            (r#"{"method":"a","params":{"s":"\ud83d","id":3}}"#, INVALID_REQUEST, None),
        ];
        for (text, code, id) in cases {
            let (echoed, got, message) = refused(text);
            assert_eq!((got, echoed.as_deref()), (code, id), "{text}: {message}");
            assert!(message.ends_with('.'), "{message}");
        }
    }

    #[test]
    fn responses_and_notifications_are_told_apart() {
        assert!(matches!(Message::parse(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#, 8), Ok(Message::Response)));
        assert!(matches!(
            Message::parse(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#, 8),
            Ok(Message::Notification { .. })
        ));
        assert!(matches!(
            Message::parse(r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":null}"#, 8),
            Ok(Message::Request { .. })
        ));
    }
}
