//! The headers in which a 2026-07-28 message repeats parts of its body (Streamable HTTP, "Request Metadata").
//!
//! A client on stdio knows nothing of them, so they are made here: from the body, and for `Mcp-Param-*` from the
//! tools that went by in answers to tools/list. A tool whose annotations break the rules must not be offered over
//! HTTP, so it is taken out of the list.

use std::borrow::Cow;
use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

use super::message::Outgoing;
use crate::json::{self, MAX_DEPTH};
use crate::mcp::headers::{METHOD, NAME, PROTOCOL_VERSION, ParamHeaders};
use crate::mcp::schema;

/// The tools with arguments that are repeated in headers.
#[derive(Debug, Default)]
pub struct KnownTools {
    tools: HashMap<String, ParamHeaders>,
}

impl KnownTools {
    /// The headers of a modern message; none for a legacy one.
    pub fn headers(&self, message: &Outgoing) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let Some(version) = &message.version else { return headers };
        headers.insert(PROTOCOL_VERSION, version.clone());
        headers.insert(METHOD, value(&message.method));
        let params = json::member(message.text(), "params").unwrap_or("{}");
        let named_by = match &*message.method {
            "tools/call" | "prompts/get" => "name",
            "resources/read" => "uri",
            method if method.starts_with("tasks/") => "taskId",
            _ => return headers,
        };
        let Some(name) = json::member(params, named_by).and_then(json::as_string) else { return headers };
        headers.insert(NAME, value(&name));
        if message.method == "tools/call"
            && let Some(known) = self.tools.get(&*name)
        {
            let arguments = json::member(params, "arguments").unwrap_or("{}");
            // Of arguments that are given twice there is no one value to repeat: the server says what it thinks of them.
            for (header, argument) in known.values(arguments).unwrap_or_default() {
                if let Ok(header) = header.parse::<HeaderName>() {
                    headers.insert(header, value(&plain(argument)));
                }
            }
        }
        headers
    }

    /// Learns from an answer to tools/list. If the list holds tools that must not be offered, the answer without
    /// them is given back.
    pub fn learn(&mut self, answer: &str, is_first_page: bool) -> Option<Vec<u8>> {
        let list = json::member(answer, "result").and_then(|result| json::member(result, "tools"))?;
        if is_first_page {
            self.tools.clear();
        }
        let mut offered = Vec::new();
        let mut rejects = false;
        json::elements(list, MAX_DEPTH, |tool| match self.learn_tool(tool) {
            Ok(()) => offered.push(tool),
            Err(why) => {
                let name = json::member(tool, "name").and_then(json::as_string);
                tracing::warn!(tool.name = ?name, %why, "a tool is left out of the list");
                rejects = true;
            }
        })
        .ok()?;
        rejects.then(|| {
            let start = list.as_ptr() as usize - answer.as_ptr() as usize;
            let end = start + list.len();
            [&answer[..start], "[", &offered.join(","), "]", &answer[end..]].concat().into_bytes()
        })
    }

    fn learn_tool(&mut self, tool: &str) -> Result<(), String> {
        let Some(schema) = json::member(tool, "inputSchema") else { return Ok(()) };
        // Escapes could hide the word.
        if !schema.contains("x-mcp-header") && !schema.contains('\\') {
            return Ok(());
        }
        let schema: Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
        let headers = schema::param_headers(&schema)?;
        if let Some(name) = json::member(tool, "name").and_then(json::as_string).filter(|_| !headers.is_empty()) {
            self.tools.insert(name.into_owned(), headers);
        }
        Ok(())
    }
}

/// What a header says of an argument.
fn plain(argument: &str) -> Cow<'_, str> {
    json::as_string(argument).unwrap_or_else(|| decimal(argument).into())
}

/// A whole number without point and exponent; any other text as it is.
fn decimal(number: &str) -> String {
    /// More digits than any number that a JSON reader keeps exactly.
    const MAX_ZEROS: usize = 20;
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    if is_plain || !number.starts_with(|c: char| c == '-' || c.is_ascii_digit()) {
        return number.to_owned();
    }
    match json::canonical_number(number).as_deref().and_then(|canonical| canonical.split_once('e')) {
        None => "0".to_owned(),
        Some((digits, exponent)) => match exponent.parse() {
            Ok(zeros @ 0..=MAX_ZEROS) => format!("{digits}{}", "0".repeat(zeros)),
            _ => number.to_owned(),
        },
    }
}

/// A text as a header's value: itself if that is safe, else in Base64 ("Value Encoding").
fn value(text: &str) -> HeaderValue {
    let is_plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    let is_trimmed = !text.starts_with(' ') && !text.ends_with(' ');
    let looks_encoded = text.starts_with("=?base64?") && text.ends_with("?=");
    let plain = HeaderValue::from_str(text).ok().filter(|_| is_plain && is_trimmed && !looks_encoded);
    plain.unwrap_or_else(|| {
        let encoded = format!("=?base64?{}?=", STANDARD.encode(text));
        HeaderValue::try_from(encoded).expect("Base64 is visible ASCII")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;

    fn headers(tools: &KnownTools, method: &str, params: &str) -> Vec<(String, String)> {
        let line = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{{META}{params}}}}}"#);
        let headers = tools.headers(&Outgoing::parse(line.into_bytes()).unwrap());
        let mut pairs: Vec<_> =
            headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
        pairs.sort();
        pairs
    }

    fn expect(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let mut all = vec![("mcp-protocol-version".to_owned(), "2026-07-28".to_owned())];
        all.extend(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        all.sort();
        all
    }

    #[test]
    fn values_are_encoded_where_a_header_cannot_carry_them() {
        for (text, header) in [
            ("us-west1", "us-west1"),
            ("", ""),
            ("a b", "a b"),
            ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ] {
            assert_eq!(value(text), header, "{text}");
        }
        let numbers = [("42", "42"), ("-7", "-7"), ("42.0", "42"), ("1e2", "100"), ("-1.5E1", "-15"), ("0.0", "0")];
        for (number, plain) in numbers.into_iter().chain([("1.5", "1.5"), ("1e99", "1e99"), ("true", "true")]) {
            assert_eq!(decimal(number), plain);
        }
    }

    #[test]
    fn a_modern_message_is_repeated_in_headers_and_a_legacy_one_is_not() {
        let none = KnownTools::default();
        assert_eq!(headers(&none, "tools/list", ""), expect(&[("mcp-method", "tools/list")]));
        for (method, params, name) in [
            ("tools/call", r#","name":"a b""#, "a b"),
            ("prompts/get", r#","name":"世""#, "=?base64?5LiW?="),
            ("resources/read", r#","uri":"file:///x","name":"y""#, "file:///x"),
            ("tasks/get", r#","taskId":"t""#, "t"),
        ] {
            assert_eq!(headers(&none, method, params), expect(&[("mcp-method", method), ("mcp-name", name)]));
        }
        let legacy = Outgoing::parse(br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#.to_vec()).unwrap();
        assert!(none.headers(&legacy).is_empty());
    }

    #[test]
    fn annotated_arguments_of_listed_tools_become_headers() {
        let list = r#"{"result":{"tools":[{"name":"t","inputSchema":{"properties":{
            "r":{"type":"string","x-mcp-header":"Region"},
            "n":{"type":"integer","x-mcp-header":"N"},
            "o":{"properties":{"b":{"type":"boolean","x-mcp-header":"B"}}}}}}]}}"#;
        let mut tools = KnownTools::default();
        assert_eq!(tools.learn(list, true), None);
        let call = |params: &str| headers(&tools, "tools/call", &format!(r#","name":"t","arguments":{params}"#));
        let base = [("mcp-method", "tools/call"), ("mcp-name", "t")];
        let params = [("mcp-param-region", "=?base64?5LiW?="), ("mcp-param-n", "42"), ("mcp-param-b", "true")];
        assert_eq!(call(r#"{"r":"\u4e16","n":42.0,"o":{"b":true}}"#), expect(&[&base[..], &params].concat()));
        assert_eq!(call(r#"{"r":null,"o":{}}"#), expect(&base));
        // The next page adds; a new list replaces.
        tools.learn(r#"{"result":{"tools":[]}}"#, false);
        assert_eq!(tools.tools.len(), 1);
        tools.learn(r#"{"result":{"tools":[]}}"#, true);
        assert!(tools.tools.is_empty());
        tools.learn(r#"{"error":{}}"#, true);
    }

    #[test]
    fn tools_with_invalid_annotations_are_left_out_and_the_rest_stays_as_written() {
        let bad = r#"{"name":"bad","inputSchema":{"properties":{"r":{"type":"number","x-mcp-header":"R"}}}}"#;
        let (one, two) = (r#"{ "name":"one","x":1.0}"#, r#"{"name":"two","inputSchema":{}}"#);
        let answer = |tools: &str| format!(r#"{{"id":1,"result":{{"tools":{tools},"ttlMs":0}} }}"#);
        let mut tools = KnownTools::default();
        let cleaned = tools.learn(&answer(&format!("[{one}, {bad} ,{two}]")), true).unwrap();
        assert_eq!(String::from_utf8(cleaned).unwrap(), answer(&format!("[{one},{two}]")));
        assert_eq!(tools.learn(&answer(&format!("[{bad}]")), true).unwrap(), answer("[]").into_bytes());
        assert_eq!(tools.learn(&answer(&format!("[{one}]")), true), None);
    }
}
