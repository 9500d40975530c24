//! Bridge frames as an app sees them: those of the proxy are read, those for the proxy are written.
//!
//! Arguments, results and tools stay text. What is not known here is passed over: a newer proxy may say more.

use std::borrow::Cow;

use crate::json::{self, MAX_DEPTH, Reader};

/// What the proxy says.
#[derive(Debug, PartialEq)]
pub enum FromProxy<'a> {
    /// The first frame of a bridge.
    Hello {
        /// The calls that an earlier bridge carried and that are still wanted.
        pending: Vec<Cow<'a, str>>,
    },
    /// Is the app alive?
    Ping,
    /// Run a tool.
    Invoke(Invoke<'a>),
    /// A call is not wanted any more.
    Cancel {
        /// Which one.
        request_id: Cow<'a, str>,
        /// Why.
        reason: Cow<'a, str>,
    },
    /// The tools were taken.
    ToolsUpdated,
    /// Something that the app sent was wrong.
    Error(Cow<'a, str>),
    /// A frame that is not known here.
    Other,
}

/// A call.
#[derive(Debug, PartialEq)]
pub struct Invoke<'a> {
    /// Which one.
    pub request_id: Cow<'a, str>,
    /// The tool's name.
    pub tool: Cow<'a, str>,
    /// The arguments' text, an object.
    pub arguments: &'a str,
    /// Whether the caller wants to hear of progress.
    pub progress: bool,
    /// What is left of the call's time, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// The request's `_meta`.
    pub meta: Option<&'a str>,
    /// Answers to an earlier `input_required` result.
    pub input_responses: Option<&'a str>,
    /// The state of an earlier `input_required` result.
    pub request_state: Option<&'a str>,
}

impl<'a> FromProxy<'a> {
    /// Reads a frame.
    ///
    /// # Errors
    /// A sentence for the log.
    pub fn parse(text: &'a str) -> Result<Self, String> {
        let mut draft = Draft::default();
        draft.read(text).map_err(|error| format!("The proxy sent a frame that cannot be read: {error}."))?;
        let string = |value: Option<&'a str>| value.and_then(json::as_string);
        let needed = |value, name: &str| string(value).ok_or_else(|| format!("The proxy sent a frame without {name}."));
        let kind = needed(draft.kind, "a type")?;
        Ok(match &*kind {
            "ping" => FromProxy::Ping,
            "hello" => {
                let mut pending = Vec::new();
                json::elements(draft.pending.unwrap_or("[]"), MAX_DEPTH, |id| pending.extend(json::as_string(id)))
                    .map_err(|error| format!("The proxy sent a hello that cannot be read: {error}."))?;
                FromProxy::Hello { pending }
            }
            "invoke_tool" => FromProxy::Invoke(Invoke {
                request_id: needed(draft.request_id, "a request_id")?,
                tool: needed(draft.tool, "a tool_name")?,
                arguments: draft.arguments.filter(|text| json::is_object(text)).unwrap_or("{}"),
                progress: draft.progress == Some("true"),
                timeout_ms: draft.timeout_ms.and_then(|text| text.parse().ok()),
                meta: draft.meta,
                input_responses: draft.input_responses,
                request_state: draft.request_state,
            }),
            "cancel_tool" => FromProxy::Cancel {
                request_id: needed(draft.request_id, "a request_id")?,
                reason: string(draft.reason).unwrap_or_default(),
            },
            "tools_updated" => FromProxy::ToolsUpdated,
            "error" => FromProxy::Error(string(draft.message).unwrap_or_default()),
            _ => FromProxy::Other,
        })
    }
}

#[derive(Default)]
struct Draft<'a> {
    kind: Option<&'a str>,
    request_id: Option<&'a str>,
    tool: Option<&'a str>,
    arguments: Option<&'a str>,
    progress: Option<&'a str>,
    timeout_ms: Option<&'a str>,
    meta: Option<&'a str>,
    input_responses: Option<&'a str>,
    request_state: Option<&'a str>,
    pending: Option<&'a str>,
    reason: Option<&'a str>,
    message: Option<&'a str>,
}

impl<'a> Draft<'a> {
    fn read(&mut self, text: &'a str) -> Result<(), json::JsonError> {
        let mut reader = Reader::new(text, MAX_DEPTH);
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            let value = reader.value()?;
            let slot = match &*key {
                "type" => &mut self.kind,
                "request_id" => &mut self.request_id,
                "tool_name" => &mut self.tool,
                "arguments" => &mut self.arguments,
                "progress" => &mut self.progress,
                "timeout_ms" => &mut self.timeout_ms,
                "meta" => &mut self.meta,
                "input_responses" => &mut self.input_responses,
                "request_state" => &mut self.request_state,
                "pending" => &mut self.pending,
                "reason" => &mut self.reason,
                "message" => &mut self.message,
                _ => continue,
            };
            *slot = (value != "null").then_some(value);
        }
        reader.end()
    }
}

/// How a call ended. Results are JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Any JSON.
    Content(String),
    /// A whole MCP CallToolResult.
    Result(String),
    /// The tool failed; the caller's model reads why.
    Failed(String),
    /// A JSON-RPC error.
    RpcError {
        /// Its code.
        code: i64,
        /// Its message.
        message: String,
        /// Its data.
        data: Option<String>,
    },
    /// A `hello` named a call that never came here.
    Unknown,
}

impl Answer {
    /// The `invoke_result` frame.
    pub fn frame(&self, session: &str, request_id: &str) -> String {
        let mut out = head("invoke_result", session);
        push_string_member(&mut out, "request_id", request_id);
        match self {
            Answer::Content(content) => {
                out.extend_from_slice(br#","ok":true,"content":"#);
                out.extend_from_slice(content.as_bytes());
            }
            Answer::Result(result) => {
                out.extend_from_slice(br#","ok":true,"result":"#);
                out.extend_from_slice(result.as_bytes());
            }
            Answer::Failed(error) => {
                out.extend_from_slice(br#","ok":false"#);
                push_string_member(&mut out, "error", error);
            }
            Answer::RpcError { code, message, data } => {
                out.extend_from_slice(format!(r#","ok":false,"error":{{"code":{code}"#).as_bytes());
                push_string_member(&mut out, "message", message);
                if let Some(data) = data {
                    out.extend_from_slice(br#","data":"#);
                    out.extend_from_slice(data.as_bytes());
                }
                out.push(b'}');
            }
            Answer::Unknown => out.extend_from_slice(br#","ok":false,"error":{"code":"unknown_request"}"#),
        }
        end(out)
    }
}

/// How far a call is.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// How far.
    pub progress: f64,
    /// Of how much.
    pub total: Option<f64>,
    /// In words.
    pub message: Option<String>,
}

impl Progress {
    /// The `tool_progress` frame.
    pub fn frame(&self, session: &str, request_id: &str) -> String {
        let mut out = head("tool_progress", session);
        push_string_member(&mut out, "request_id", request_id);
        out.extend_from_slice(format!(r#","progress":{}"#, self.progress).as_bytes());
        if let Some(total) = self.total {
            out.extend_from_slice(format!(r#","total":{total}"#).as_bytes());
        }
        if let Some(message) = &self.message {
            push_string_member(&mut out, "message", message);
        }
        end(out)
    }
}

/// The answer to a `ping`.
pub const PONG: &str = r#"{"type":"pong"}"#;

/// An `update_tools` frame; `tools` is the text of an array.
pub fn update_tools(session: &str, tools: &str) -> String {
    let mut out = head("update_tools", session);
    out.extend_from_slice(br#","tools":"#);
    out.extend_from_slice(tools.as_bytes());
    end(out)
}

fn head(kind: &str, session: &str) -> Vec<u8> {
    let mut out = format!(r#"{{"type":"{kind}""#).into_bytes();
    push_string_member(&mut out, "mcpSessionId", session);
    out
}

fn push_string_member(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(format!(r#","{name}":"#).as_bytes());
    json::push_string(out, value);
}

fn end(mut out: Vec<u8>) -> String {
    out.push(b'}');
    String::from_utf8(out).expect("pieces of text make a text")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{self, Context, SessionId, Spelling};

    #[test]
    fn the_proxys_frames_are_understood() {
        let session = SessionId::random();
        let context = Context {
            meta: Some(r#"{"traceparent":"00","progressToken":1}"#),
            request_state: Some("\"s\""),
            ..Context::default()
        };
        let invoke = protocol::Invoke {
            session,
            number: 7,
            tool: "a\"b",
            arguments: r#"{"n":1E2}"#,
            progress: true,
            context: Some(context),
        };
        let mut frame = invoke.write(Spelling::Snake);
        protocol::finish_invoke(&mut frame, Spelling::Snake, Some(1500));
        let frame = String::from_utf8(frame).unwrap();
        let FromProxy::Invoke(read) = FromProxy::parse(&frame).unwrap() else { panic!("{frame}") };
        assert_eq!((&*read.request_id, &*read.tool), (&*format!("{session}:7"), "a\"b"));
        assert_eq!((read.arguments, read.progress, read.timeout_ms), (r#"{"n":1E2}"#, true, Some(1500)));
        assert_eq!((read.meta, read.request_state), (Some(r#"{"traceparent":"00"}"#), Some("\"s\"")));

        assert_eq!(FromProxy::parse(protocol::PING), Ok(FromProxy::Ping));
        let hello = protocol::hello_frame(
            session,
            2,
            "i",
            std::time::Duration::from_secs(15),
            [7, 8].into_iter(),
            Spelling::Snake,
        );
        let pending = vec![format!("{session}:7").into(), format!("{session}:8").into()];
        assert_eq!(FromProxy::parse(std::str::from_utf8(&hello).unwrap()), Ok(FromProxy::Hello { pending }));
        assert_eq!(FromProxy::parse(r#"{"type":"later","x":1}"#), Ok(FromProxy::Other));
        for bad in ["", "[]", "{}", r#"{"type":1}"#, r#"{"type":"invoke_tool"}"#, r#"{"type":"hello","pending":1}"#] {
            assert!(FromProxy::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_proxy_understands_our_frames() {
        use crate::protocol::{Answer as Theirs, FromApp};
        let session = SessionId::random();
        let (id, request_id) = (session.to_string(), format!("{session}:7"));
        let read = |answer: Answer, expected: Theirs<'_>| {
            let frame = answer.frame(&id, &request_id);
            let Ok(FromApp::Result { call, answer }) = FromApp::parse(&frame, 64) else { panic!("{frame}") };
            assert_eq!((call.number_in(session), answer), (Some(7), expected));
        };
        read(Answer::Content("[1.0]".into()), Theirs::Content("[1.0]"));
        read(Answer::Result(r#"{"content":[]}"#.into()), Theirs::Result(r#"{"content":[]}"#));
        read(Answer::Failed("\"no\"".into()), Theirs::Failed("\"no\"".into()));
        read(Answer::Unknown, Theirs::UnknownRequest);
        let error = Answer::RpcError { code: -32602, message: "m".into(), data: Some("{}".into()) };
        read(error, Theirs::RpcError { code: -32602, message: "m".into(), data: Some("{}") });

        let progress = Progress { progress: 2.0, total: Some(2.5), message: Some("half\n".into()) };
        let frame = progress.frame(&id, &request_id);
        let Ok(FromApp::Progress { progress, .. }) = FromApp::parse(&frame, 64) else { panic!("{frame}") };
        assert_eq!(progress, protocol::Progress { progress: "2", total: Some("2.5"), message: Some(r#""half\n""#) });
        let frame = update_tools(&id, "[]");
        assert_eq!(FromApp::parse(&frame, 64), Ok(FromApp::UpdateTools { tools: "[]" }));
        assert_eq!(FromApp::parse(PONG, 64), Ok(FromApp::Pong));
    }
}
