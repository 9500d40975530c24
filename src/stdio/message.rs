//! A line from the client, read as far as it must be to send it on. The line itself is sent, not what was read.

use bytes::Bytes;
use http::HeaderValue;

use crate::json::{self, JsonError, MAX_DEPTH, Reader};
use crate::jsonrpc::{self, INVALID_PARAMS, INVALID_REQUEST, Invalid, Message, PARSE_ERROR};

/// One message, or one batch, to be sent.
#[derive(Debug)]
pub struct Outgoing {
    /// What is sent.
    pub body: Bytes,
    /// Who wants an answer.
    pub ids: Ids,
    /// The method; empty for batches and for answers of the client.
    pub method: String,
    /// The protocol version in `_meta`, which makes the message a modern one.
    pub version: Option<HeaderValue>,
    /// `notifications/cancelled`: the text of the id that it means.
    pub cancels: Option<String>,
}

/// Who wants an answer to a message. Each id is kept as its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ids {
    /// Nobody: a notification, or the client's answer to a request of the server.
    None,
    /// A request.
    One(String),
    /// The requests of a batch (2025-03-26).
    Batch(Vec<String>),
}

impl Ids {
    /// What tells everybody who waits for an answer that there will be none; `None` if nobody does.
    pub fn error(&self, code: i64, message: &str, data: Option<&str>) -> Option<Vec<u8>> {
        match self {
            Ids::None => None,
            Ids::One(id) => Some(jsonrpc::error(Some(id), code, message, data)),
            Ids::Batch(ids) => {
                let errors: Vec<_> = ids.iter().map(|id| jsonrpc::error(Some(id), code, message, data)).collect();
                Some([b"[", &*errors.join(&b','), b"]"].concat())
            }
        }
    }
}

impl Outgoing {
    /// Reads a line.
    ///
    /// # Errors
    /// The whole JSON-RPC error that answers it.
    pub fn parse(line: Vec<u8>) -> Result<Self, Vec<u8>> {
        let Ok(text) = std::str::from_utf8(&line) else {
            return Err(jsonrpc::error(None, PARSE_ERROR, "The line is not valid UTF-8.", None));
        };
        let mut outgoing =
            Outgoing { body: Bytes::new(), ids: Ids::None, method: String::new(), version: None, cancels: None };
        if text.trim_start().starts_with('[') {
            let ids = batch_ids(text)?;
            outgoing.ids = if ids.is_empty() { Ids::None } else { Ids::Batch(ids) };
        } else {
            let refuse = |Invalid { id, code, message, .. }: Invalid| jsonrpc::error(id, code, &message, None);
            let (id, method, params) = match Message::parse(text, MAX_DEPTH).map_err(refuse)? {
                Message::Request { id, method, params } => (Some(id), method, params),
                Message::Notification { method, params } => (None, method, params),
                Message::Response => (None, "".into(), jsonrpc::Params::default()),
            };
            if let Some(version) = params.meta.as_ref().and_then(|meta| meta.protocol_version) {
                outgoing.version =
                    Some(version_header(version).map_err(|message| jsonrpc::error(id, INVALID_PARAMS, message, None))?);
            }
            if id.is_none() && method == "notifications/cancelled" {
                outgoing.cancels = params.request_id.map(str::to_owned);
            }
            outgoing.ids = id.map_or(Ids::None, |id| Ids::One(id.to_owned()));
            outgoing.method = method.into_owned();
        }
        outgoing.body = line.into();
        Ok(outgoing)
    }

    /// The error that answers a line of which only the beginning, `prefix`, was kept.
    pub fn too_long(prefix: &[u8], limit: usize) -> Vec<u8> {
        let message = format!("The line is longer than {limit} bytes, which is the limit.");
        let valid = prefix.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        // Of a text that breaks off, the reader still knows the id if it came first.
        let id = Message::parse(valid, MAX_DEPTH).err().and_then(|invalid| invalid.id);
        jsonrpc::error(id, INVALID_REQUEST, &message, None)
    }

    /// The body's text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the line was checked when it was parsed")
    }

    /// Whether an answer is wanted.
    pub fn is_request(&self) -> bool {
        self.ids != Ids::None
    }

    /// Takes the member `mcpSessionId` out of the params; gives its text. All other members stay as they were
    /// written.
    pub fn take_session(&mut self) -> Option<String> {
        let text = self.text();
        let params = json::member(text, "params")?;
        let (kept, taken) = without_member(params, "mcpSessionId").ok()?;
        let taken = taken?.to_owned();
        let start = params.as_ptr() as usize - text.as_ptr() as usize;
        let body = [&text[..start], &kept, &text[start + params.len()..]].concat();
        self.body = body.into();
        Some(taken)
    }
}

/// The ids of the requests in a batch. What is wrong with one of its messages is left to the server to say.
fn batch_ids(text: &str) -> Result<Vec<String>, Vec<u8>> {
    let mut ids = Vec::new();
    json::elements(text, MAX_DEPTH, |message| {
        if let Ok(Message::Request { id, .. }) = Message::parse(message, MAX_DEPTH) {
            ids.push(id.to_owned());
        }
    })
    .map_err(|error| jsonrpc::error(None, PARSE_ERROR, &format!("{error}."), None))?;
    Ok(ids)
}

fn version_header(version: &str) -> Result<HeaderValue, &'static str> {
    let version = json::as_string(version).and_then(|version| HeaderValue::from_str(&version).ok());
    version
        .ok_or("params._meta: 'io.modelcontextprotocol/protocolVersion' must be a string of visible ASCII characters.")
}

/// The text of `object` without the members called `name`, and the last one's value.
fn without_member<'a>(object: &'a str, name: &str) -> Result<(String, Option<&'a str>), JsonError> {
    let mut reader = Reader::new(object, MAX_DEPTH);
    let mut kept = String::with_capacity(object.len());
    let mut taken = None;
    reader.begin_object()?;
    loop {
        let mark = reader.mark();
        let Some(key) = reader.next_key()? else { break };
        let value = reader.value()?;
        if key == name {
            taken = Some(value);
        } else {
            let member = reader.since(mark);
            kept.push_str(if kept.is_empty() { "{" } else { "," });
            kept.push_str(member.strip_prefix(',').unwrap_or(member).trim_start());
        }
    }
    kept.push_str(if kept.is_empty() { "{}" } else { "}" });
    Ok((kept, taken))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Outgoing {
        Outgoing::parse(line.as_bytes().to_vec()).unwrap_or_else(|error| panic!("{}", String::from_utf8_lossy(&error)))
    }

    #[test]
    fn a_line_is_sent_as_it_was_written() {
        let line = "{ \"jsonrpc\":\"2.0\",\"id\":1E2,\"method\":\"tools\\/call\",\"params\":{\"n\":1.0,\"s\":\"\\u2028\u{2028}\"}}\r";
        let outgoing = parse(line);
        assert_eq!(outgoing.body, line);
        assert_eq!((outgoing.ids, &*outgoing.method), (Ids::One("1E2".into()), "tools/call"));
        assert!(outgoing.version.is_none() && outgoing.cancels.is_none());
    }

    #[test]
    fn eras_and_cancellations_are_recognized() {
        let meta = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;
        let modern = parse(&format!(r#"{{"jsonrpc":"2.0","id":"a","method":"tools/list","params":{{{meta}}}}}"#));
        assert_eq!(modern.version.unwrap(), "2026-07-28");
        let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"a"}}"#;
        assert_eq!(parse(cancel).cancels.as_deref(), Some("\"a\""));
        assert!(!parse(cancel).is_request());
        assert!(!parse(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).is_request());
        let bad = br#"{"jsonrpc":"2.0","id":1,"method":"x","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"\n"}}}"#;
        let error = String::from_utf8(Outgoing::parse(bad.to_vec()).unwrap_err()).unwrap();
        assert!(error.contains(r#""id":1"#) && error.contains("-32602"), "{error}");
    }

    #[test]
    fn what_is_no_message_is_answered_with_its_id_if_that_can_be_known() {
        for (line, code, id) in [
            (&b"{"[..], "-32700", ""),
            (b"\xff", "-32700", ""),
            (b"[", "-32700", ""),
            (b"7", "-32600", ""),
            (br#"{"jsonrpc":"2.0","id":5,"method":7}"#, "-32600", r#""id":5"#),
        ] {
            let error = String::from_utf8(Outgoing::parse(line.to_vec()).unwrap_err()).unwrap();
            assert!(error.contains(code) && error.contains(id), "{error}");
        }
        let long = String::from_utf8(Outgoing::too_long(br#"{"jsonrpc":"2.0","id":5,"method":"x","par"#, 10)).unwrap();
        assert!(long.contains(r#""id":5"#) && long.contains("10 bytes"), "{long}");
        assert!(!String::from_utf8(Outgoing::too_long(b"\xff", 10)).unwrap().contains(r#""id""#));
    }

    #[test]
    fn a_batch_is_failed_as_a_batch() {
        let batch = parse(
            r#"[{"jsonrpc":"2.0","id":1,"method":"a"},{"jsonrpc":"2.0","method":"b"},7,{"jsonrpc":"2.0","id":"x","method":"c"}]"#,
        );
        assert_eq!(batch.ids, Ids::Batch(vec!["1".into(), "\"x\"".into()]));
        let error = String::from_utf8(batch.ids.error(503, "Gone.", None).unwrap()).unwrap();
        assert_eq!(
            error,
            r#"[{"jsonrpc":"2.0","id":1,"error":{"code":503,"message":"Gone."}},{"jsonrpc":"2.0","id":"x","error":{"code":503,"message":"Gone."}}]"#
        );
        assert_eq!(parse(r#"[{"jsonrpc":"2.0","method":"b"}]"#).ids, Ids::None);
    }

    #[test]
    fn the_session_is_taken_out_and_nothing_else_changes() {
        for (before, after, id) in [
            (r#"{"mcpSessionId":"s","a": 1.0 , "b":"x"}"#, r#"{"a": 1.0,"b":"x"}"#, Some("\"s\"")),
            (r#"{ "a":[1,2],"mcpSessionId" : "s" }"#, r#"{"a":[1,2]}"#, Some("\"s\"")),
            (r#"{"mcpSession\u0049d":7}"#, r#"{}"#, Some("7")),
            (r#"{ "a": {"mcpSessionId":1} }"#, r#"{ "a": {"mcpSessionId":1} }"#, None),
        ] {
            let frame =
                |params: &str| format!(r#"{{"id":1,"jsonrpc":"2.0","params":{params},"method":"initialize" }}"#);
            let mut outgoing = parse(&frame(before));
            assert_eq!(outgoing.take_session().as_deref(), id);
            assert_eq!(outgoing.text(), frame(after));
        }
        assert_eq!(parse(r#"{"jsonrpc":"2.0","id":1,"method":"initialize"}"#).take_session(), None);
    }
}
