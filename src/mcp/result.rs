//! From what an app answered to what an MCP client of a given version is told.
//!
//! The app's JSON is copied, never re-written: key order and number text stay. Clients check results strictly and
//! throw a whole one away for a single unknown block, so a result that they would choke on becomes a readable
//! `isError` result instead.

use bytes::Bytes;
use http::StatusCode;

use super::{Era, Output, Reply, Told};
use crate::{json, jsonrpc};

/// Up to here an object's text copy is pretty-printed; beyond, it is the app's own text.
const PRETTY_TEXT_BYTES: usize = 64 * 1024;

/// What shapes the answer to a call.
#[derive(Debug, Clone)]
pub struct Shape {
    /// The client's era.
    pub era: Era,
    /// What the tool promises.
    pub output: Output,
    /// The server's identity, as JSON text; 2026-07-28 clients get it with every result.
    pub server_info: Bytes,
    /// The most bytes of the answer.
    pub limit: usize,
}

impl Shape {
    /// The status and the whole JSON-RPC response for a reply, and in a word what it tells.
    pub fn response(&self, id: &str, reply: &Reply) -> (StatusCode, Vec<u8>, Told) {
        let (result, told) = match reply {
            Reply::Content(content) => self.content(id, as_text(content)),
            Reply::Result(result) => self.result(id, as_text(result)),
            Reply::Failed(error) => (self.failed(id, error), Told::ToolError),
            Reply::RpcError { code, message, data } => {
                let data = data.as_ref().map(as_text);
                let error = jsonrpc::error(Some(id), *code, message, data);
                return (self.error_status(*code), error, Told::RpcError);
            }
        };
        if result.len() > self.limit {
            let error =
                format!("The tool's result takes {} bytes as an answer; the limit is {}.", result.len(), self.limit);
            return (StatusCode::OK, self.failed(id, &error), Told::TooLarge);
        }
        (StatusCode::OK, result, told)
    }

    /// The status of an app's own error. A missing capability has one of its own in 2026-07-28; the other codes that
    /// have are the proxy's word for a call that was not made, and some clients then make it again.
    pub fn error_status(&self, code: i64) -> StatusCode {
        match code {
            super::HEADER_MISMATCH | super::UNSUPPORTED_VERSION => StatusCode::OK,
            _ => super::error_status(self.era, code),
        }
    }

    /// A result that says that the tool failed.
    pub fn failed(&self, id: &str, text: &str) -> Vec<u8> {
        let mut out = jsonrpc::result_prefix(id, text.len() + 160 + self.server_info.len());
        out.extend_from_slice(b"{\"content\":[{\"type\":\"text\",\"text\":");
        json::push_string(&mut out, text);
        out.extend_from_slice(b"}],\"isError\":true");
        self.finish(&mut out, false, false);
        out
    }

    /// The seed's `content`: any JSON.
    fn content(&self, id: &str, content: &str) -> (Vec<u8>, Told) {
        let is_object = json::is_object(content);
        if self.output == Output::Object && !is_object {
            return (self.failed(id, MISSING_STRUCTURED), Told::Malformed);
        }
        // The text copy is left out where the answer would not fit with it.
        let mut out = self.write_content(id, content, None);
        if is_object && out.len() > self.limit {
            let note = format!("The result has {} bytes of JSON; it is in structuredContent.", content.len());
            out = self.write_content(id, content, Some(&note));
        }
        (out, Told::Result)
    }

    fn write_content(&self, id: &str, content: &str, note: Option<&str>) -> Vec<u8> {
        let is_object = json::is_object(content);
        let is_structured = is_object || (self.output == Output::Any && matches!(self.era, Era::Modern(_)));
        let mut out = jsonrpc::result_prefix(id, 2 * content.len() + content.len() / 4 + 192 + self.server_info.len());
        out.extend_from_slice(b"{\"content\":[{\"type\":\"text\",\"text\":");
        match note {
            Some(note) => json::push_string(&mut out, note),
            // A string is its own text, and already written as JSON.
            None if json::is_string(content) => out.extend_from_slice(content.as_bytes()),
            None => push_text_copy(&mut out, content),
        }
        out.extend_from_slice(b"}]");
        if is_structured {
            out.extend_from_slice(b",\"structuredContent\":");
            out.extend_from_slice(content.as_bytes());
        }
        out.extend_from_slice(b",\"isError\":false");
        self.finish(&mut out, false, false);
        out
    }

    /// A whole CallToolResult.
    fn result(&self, id: &str, result: &str) -> (Vec<u8>, Told) {
        self.checked_result(id, result).unwrap_or_else(|error| {
            let error = format!("The app's result is not a valid CallToolResult: {error}.");
            (self.failed(id, &error), Told::Malformed)
        })
    }

    fn checked_result(&self, id: &str, result: &str) -> Result<(Vec<u8>, Told), String> {
        let parts = Parts::read(result)?;
        if parts.is_input_required {
            if matches!(self.era, Era::Legacy(_)) {
                let text = "The tool asks for input, which only clients of MCP 2026-07-28 or later can give.";
                return Ok((self.failed(id, text), Told::ToolError));
            }
            if parts.input_requests.is_none() && parts.request_state.is_none() {
                return Err("an input_required result needs inputRequests or requestState".into());
            }
        }
        // Older clients refuse structured content that is not an object, and all of them what the schema does not allow.
        let may_be_any = self.output != Output::Object && matches!(self.era, Era::Modern(_));
        let structured = parts.structured.filter(|s| may_be_any || json::is_object(s));
        let is_promised = match self.output {
            Output::Unspecified => false,
            Output::Object => true,
            Output::Any => matches!(self.era, Era::Modern(_)),
        };
        if is_promised && structured.is_none() && !parts.is_error && !parts.is_input_required {
            return Ok((self.failed(id, MISSING_STRUCTURED), Told::Malformed));
        }
        let mut out = jsonrpc::result_prefix(id, result.len() + result.len() / 8 + 192 + self.server_info.len());
        out.push(b'{');
        let start = out.len();
        let mut push = |key: &str, value: &str| {
            if out.len() > start {
                out.push(b',');
            }
            json::push_string(&mut out, key);
            out.push(b':');
            out.extend_from_slice(value.as_bytes());
        };
        let mut meta_text = None;
        json::members(result, |key, value| match key {
            "content" | "structuredContent" | "isError" | "resultType" | "_meta" if value == "null" => {}
            "content" if parts.content_is_empty => {}
            "structuredContent" if structured.is_none() => {}
            "_meta" => meta_text = Some(value),
            _ => push(key, value),
        })
        .map_err(|error| error.to_string())?;
        if parts.content_is_empty && !parts.is_input_required {
            let mut content = b"[".to_vec();
            if let Some(structured) = parts.structured {
                content.extend_from_slice(b"{\"type\":\"text\",\"text\":");
                push_text_copy(&mut content, structured);
                content.push(b'}');
            }
            content.push(b']');
            push("content", &String::from_utf8_lossy(&content));
        }
        if let Some(meta) = meta_text {
            push("_meta", &self.meta_with_server_info(meta));
        }
        if out.len() == start {
            // Nothing to put a comma after.
            out.extend_from_slice(b"\"content\":[]");
        }
        self.finish(&mut out, parts.has_result_type, meta_text.is_some());
        Ok((out, if parts.is_error { Told::ToolError } else { Told::Result }))
    }

    fn meta_with_server_info(&self, meta: &str) -> String {
        if matches!(self.era, Era::Legacy(_)) || json::member(meta, super::SERVER_INFO_KEY).is_some() {
            return meta.to_owned();
        }
        let inner = meta[1..].trim_start();
        let separator = if inner.starts_with('}') { "" } else { "," };
        format!("{{\"{}\":{}{separator}{inner}", super::SERVER_INFO_KEY, as_text(&self.server_info))
    }

    /// Adds what every result of the era carries, and closes the result and the response.
    fn finish(&self, out: &mut Vec<u8>, has_result_type: bool, has_meta: bool) {
        if matches!(self.era, Era::Modern(_)) {
            if !has_result_type {
                out.extend_from_slice(b",\"resultType\":\"complete\"");
            }
            if !has_meta {
                out.extend_from_slice(b",\"_meta\":{\"");
                out.extend_from_slice(super::SERVER_INFO_KEY.as_bytes());
                out.extend_from_slice(b"\":");
                out.extend_from_slice(&self.server_info);
                out.push(b'}');
            }
        }
        out.extend_from_slice(b"}}");
    }
}

const MISSING_STRUCTURED: &str =
    "The tool declares an output_schema, but the app returned no structured content that fits it.";

/// Replies are slices of texts, cut between characters, and the server's identity is a text.
pub(super) fn as_text(bytes: &Bytes) -> &str {
    simdutf8::basic::from_utf8(bytes).unwrap_or("null")
}

/// Appends `json` as the text of a text block.
fn push_text_copy(out: &mut Vec<u8>, json: &str) {
    if json.len() > PRETTY_TEXT_BYTES {
        return json::push_string(out, json);
    }
    out.push(b'"');
    json::push_pretty_escaped(out, json);
    out.push(b'"');
}

/// What must be known of a CallToolResult before it is passed on.
#[derive(Default)]
struct Parts<'a> {
    content_is_empty: bool,
    structured: Option<&'a str>,
    input_requests: Option<&'a str>,
    request_state: Option<&'a str>,
    is_error: bool,
    is_input_required: bool,
    has_result_type: bool,
}

impl<'a> Parts<'a> {
    fn read(result: &'a str) -> Result<Self, String> {
        let mut seen: [(&str, Option<&'a str>); 7] = [
            ("content", None),
            ("structuredContent", None),
            ("isError", None),
            ("resultType", None),
            ("_meta", None),
            ("inputRequests", None),
            ("requestState", None),
        ];
        let mut twice = None;
        json::members(result, |key, value| {
            if let Some((name, slot)) = seen.iter_mut().find(|(name, _)| *name == key)
                && slot.replace(value).is_some()
            {
                twice = Some(*name);
            }
        })
        .map_err(|_| "it must be an object".to_owned())?;
        if let Some(name) = twice {
            return Err(format!("{name} is given twice"));
        }
        let [content, structured, is_error, result_type, meta, input_requests, request_state] =
            seen.map(|(_, value)| value.filter(|value| *value != "null"));
        let mut blocks = 0;
        if let Some(content) = content {
            let mut fault = None;
            json::elements(content, json::MAX_DEPTH, |block| {
                if let Err(error) = check_block(block) {
                    fault.get_or_insert_with(|| format!("content[{blocks}]: {error}"));
                }
                blocks += 1;
            })
            .map_err(|_| "content must be an array".to_owned())?;
            if let Some(fault) = fault {
                return Err(fault);
            }
        }
        if is_error.is_some_and(|value| !matches!(value, "true" | "false")) {
            return Err("isError must be true or false".into());
        }
        if meta.is_some_and(|value| !json::is_object(value)) {
            return Err("_meta must be an object".into());
        }
        if result_type.is_some_and(|value| !json::is_string(value)) {
            return Err("resultType must be a string".into());
        }
        if input_requests.is_some_and(|value| !json::is_object(value)) {
            return Err("inputRequests must be an object".into());
        }
        if request_state.is_some_and(|value| !json::is_string(value)) {
            return Err("requestState must be a string".into());
        }
        Ok(Parts {
            content_is_empty: blocks == 0,
            structured,
            input_requests,
            request_state,
            is_error: is_error == Some("true"),
            is_input_required: result_type == Some("\"input_required\""),
            has_result_type: result_type.is_some(),
        })
    }
}

/// One content block, as the strictest clients check it.
fn check_block(block: &str) -> Result<(), String> {
    let [kind, text, data, mime_type, uri, name, resource, annotations, meta, size] =
        pick(block, ["type", "text", "data", "mimeType", "uri", "name", "resource", "annotations", "_meta", "size"])?;
    need_string("type", kind)?;
    may_be("_meta must be an object", meta, json::is_object)?;
    if let Some(annotations) = annotations {
        check_annotations(annotations)?;
    }
    match kind.unwrap_or_default() {
        "\"text\"" => need_string("text", text),
        "\"image\"" | "\"audio\"" => {
            need_string("mimeType", mime_type)?;
            need_string("data", data)?;
            may_be("data must be Base64", data, is_base64)
        }
        "\"resource_link\"" => {
            need_uri("uri", uri)?;
            need_string("name", name)?;
            may_be("mimeType must be a string", mime_type, json::is_string)?;
            may_be("size must be a number", size, is_number)
        }
        "\"resource\"" => {
            let resource = resource.ok_or("resource must be an object")?;
            let [uri, text, blob, mime_type, meta] = pick(resource, ["uri", "text", "blob", "mimeType", "_meta"])
                .map_err(|error| format!("resource: {error}"))?;
            need_uri("resource.uri", uri)?;
            may_be("resource.mimeType must be a string", mime_type, json::is_string)?;
            may_be("resource._meta must be an object", meta, json::is_object)?;
            if text.is_some_and(json::is_string) || blob.is_some_and(|blob| json::is_string(blob) && is_base64(blob)) {
                return Ok(());
            }
            Err("resource needs a string 'text' or a Base64 'blob'".into())
        }
        _ => Err("type must be text, image, audio, resource_link or resource".into()),
    }
}

fn check_annotations(annotations: &str) -> Result<(), String> {
    let [audience, priority, modified] =
        pick(annotations, ["audience", "priority", "lastModified"]).map_err(|error| format!("annotations: {error}"))?;
    let is_audience = |audience: &str| {
        let mut are_roles = true;
        let is_role = |role: &str| matches!(role, "\"user\"" | "\"assistant\"");
        json::elements(audience, json::MAX_DEPTH, |role| are_roles &= is_role(role)).is_ok() && are_roles
    };
    let is_share = |priority: &str| priority.parse::<f64>().is_ok_and(|share| (0.0..=1.0).contains(&share));
    may_be("annotations.audience must be an array of user and assistant", audience, is_audience)?;
    may_be("annotations.priority must be a number from 0 to 1", priority, is_share)?;
    may_be("annotations.lastModified must be a string", modified, json::is_string)
}

fn need_string(name: &str, value: Option<&str>) -> Result<(), String> {
    match value {
        Some(value) if json::is_string(value) => Ok(()),
        _ => Err(format!("{name} must be a string")),
    }
}

/// Python's clients take only what begins with a scheme for a URI.
fn need_uri(name: &str, value: Option<&str>) -> Result<(), String> {
    need_string(name, value)?;
    let uri = json::decode_string(value.unwrap_or_default());
    let scheme = uri.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c));
    if is_scheme { Ok(()) } else { Err(format!("{name} must be a URI")) }
}

fn may_be(error: &str, value: Option<&str>, is_fit: impl Fn(&str) -> bool) -> Result<(), String> {
    if value.is_none_or(is_fit) { Ok(()) } else { Err(error.to_owned()) }
}

fn is_number(value: &str) -> bool {
    value.starts_with(|c: char| c == '-' || c.is_ascii_digit())
}

/// The values of some members of an object, in one pass.
fn pick<'a, const N: usize>(object: &'a str, names: [&str; N]) -> Result<[Option<&'a str>; N], String> {
    let mut found = [None; N];
    json::members(object, |key, value| {
        if let Some(at) = names.iter().position(|name| *name == key) {
            found[at] = Some(value);
        }
    })
    .map_err(|_| "an object is required".to_owned())?;
    Ok(found)
}

/// Whether the string with this text is standard Base64, as `atob` of JavaScript takes it.
fn is_base64(text: &str) -> bool {
    if text.contains('\\') {
        // JSON may escape a slash.
        return is_base64_text(&json::decode_string(text));
    }
    is_base64_text(&text[1..text.len() - 1])
}

fn is_base64_text(text: &str) -> bool {
    let digits = text.strip_suffix("==").or_else(|| text.strip_suffix('=')).unwrap_or(text);
    let is_whole = if digits.len() == text.len() { digits.len() % 4 != 1 } else { text.len().is_multiple_of(4) };
    let is_digit = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/');
    // A fold without an early exit is what the compiler turns into vector instructions.
    is_whole && digits.bytes().fold(true, |fits, b| fits & is_digit(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_what_javascript_takes() {
        for good in ["", "aGk=", "aGk", "aGkh", "YQ==", "YQ", "a\\/+b"] {
            assert!(is_base64(&format!("\"{good}\"")), "{good}");
        }
        for bad in ["a", "aGk==", "YQ=", "a_k-", "a b=", "aGkhY", "a\\\\bc", "====", "="] {
            assert!(!is_base64(&format!("\"{bad}\"")), "{bad}");
        }
    }

    #[test]
    fn structured_content_is_an_object_where_an_object_is_promised() {
        let answer = |output, era| {
            let shape = Shape { era, output, server_info: Bytes::from_static(b"{}"), limit: 1000 };
            let reply = Reply::Result(Bytes::from_static(br#"{"structuredContent":[1]}"#));
            let answer: serde_json::Value = serde_json::from_slice(&shape.response("1", &reply).1).unwrap();
            (answer["result"]["isError"] == true, answer["result"]["structuredContent"].clone())
        };
        let (legacy, modern) = (Era::Legacy("2025-11-25"), Era::Modern("2026-07-28"));
        let (nothing, array) = (serde_json::Value::Null, serde_json::json!([1]));
        assert_eq!(answer(Output::Object, legacy), (true, nothing.clone()));
        assert_eq!(answer(Output::Object, modern), (true, nothing.clone()));
        assert_eq!(answer(Output::Any, legacy), (false, nothing));
        assert_eq!(answer(Output::Any, modern), (false, array));
    }

    #[test]
    fn blocks_are_what_the_strictest_client_takes() {
        for good in [
            r#"{"type":"text","text":"x","annotations":{"audience":["user"],"priority":0.5},"_meta":{},"new":1}"#,
            r#"{"type":"resource_link","uri":"file:///x","name":"n","size":3,"mimeType":"a/b"}"#,
            r#"{"type":"resource","resource":{"uri":"ui://x","text":"","mimeType":"a/b","_meta":{}}}"#,
        ] {
            assert_eq!(check_block(good), Ok(()), "{good}");
        }
        for bad in [
            r#"{"type":"text","text":"x","annotations":5}"#,
            r#"{"type":"text","text":"x","annotations":{"priority":5}}"#,
            r#"{"type":"text","text":"x","annotations":{"audience":["nobody"]}}"#,
            r#"{"type":"text","text":"x","_meta":5}"#,
            r#"{"type":"resource_link","uri":"not a uri","name":"n"}"#,
            r#"{"type":"resource_link","uri":"x:y","name":"n","mimeType":5}"#,
            r#"{"type":"resource_link","uri":"x:y","name":"n","size":"big"}"#,
            r#"{"type":"resource","resource":{"uri":"x:y","text":"","mimeType":5}}"#,
        ] {
            assert!(check_block(bad).is_err(), "{bad}");
        }
    }
}
