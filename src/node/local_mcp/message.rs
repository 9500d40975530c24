//! A message to the local MCP server, read as forgivingly as local clients are used to: `jsonrpc` is not looked at,
//! a member given twice counts the last time, an id may be any number. [`crate::jsonrpc`] is stricter.

use std::collections::HashMap;

use serde_json::value::RawValue;

use crate::jsonrpc::{INVALID_REQUEST, PARSE_ERROR};

/// The deepest nesting of a message.
pub const MAX_DEPTH: usize = 64;

/// A message, as slices of its text.
#[derive(Debug, Default)]
pub struct Message<'a> {
    /// The id's text; `None` for a notification, and `null` makes one, too.
    pub id: Option<&'a str>,
    /// The method, if it is a string.
    pub method: Option<String>,
    /// The parameters' text.
    pub params: Option<&'a str>,
}

/// Why a text is no message: a JSON-RPC error to be answered with the id `null`.
#[derive(Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The error's code.
    pub code: i64,
    /// Its message.
    pub message: String,
}

/// The members of an object, as text.
pub type Members<'a> = HashMap<String, &'a RawValue>;

impl<'a> Message<'a> {
    /// Reads one message.
    ///
    /// # Errors
    /// [`Invalid`] if it is not JSON, too deep, or no object. There are no batches.
    pub fn parse(text: &'a str) -> Result<Self, Invalid> {
        let unreadable = |why: String| Invalid { code: PARSE_ERROR, message: format!("Parse error: {why}") };
        let whole: &RawValue = serde_json::from_str(text).map_err(|error| unreadable(error.to_string()))?;
        if depth(whole.get()) > MAX_DEPTH {
            return Err(unreadable(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        if !whole.get().starts_with('{') {
            return Err(Invalid { code: INVALID_REQUEST, message: "Request must be a JSON object".to_owned() });
        }
        let members: Members<'a> = serde_json::from_str(whole.get()).map_err(|error| unreadable(error.to_string()))?;
        let text = |name: &str| members.get(name).map(|value| value.get()).filter(|text| *text != "null");
        Ok(Message { id: text("id"), method: text("method").and_then(string), params: text("params") })
    }
}

/// The members of `value` if it is an object.
pub fn members(value: &str) -> Option<Members<'_>> {
    value.starts_with('{').then(|| serde_json::from_str(value).ok()).flatten()
}

/// The characters of `value` if it is a string.
pub fn string(value: &str) -> Option<String> {
    serde_json::from_str(value).ok()
}

/// How an id is echoed: strings and numbers as they were written, anything else as `null`.
pub fn echoed(id: &str) -> &str {
    match id.as_bytes() {
        [b'"' | b'-' | b'0'..=b'9', ..] => id,
        _ => "null",
    }
}

/// How deep valid JSON nests.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth -= 1,
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'"' => break,
                        b'\\' => _ = bytes.next(),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_message_is_told_apart() {
        let deep = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1));
        for text in ["", "not json", "\u{feff}{}", "{\"a\":1,}", "{} // no", "{}{}", &deep(65)] {
            let invalid = Message::parse(text).unwrap_err();
            assert_eq!(invalid.code, PARSE_ERROR, "{text}");
            assert!(invalid.message.starts_with("Parse error: "), "{}", invalid.message);
        }
        for text in ["[1,2,3]", "\"x\"", "7", "null", "[]"] {
            let message = "Request must be a JSON object".to_owned();
            assert_eq!(Message::parse(text).unwrap_err(), Invalid { code: INVALID_REQUEST, message }, "{text}");
        }
        assert!(Message::parse(&deep(64)).is_ok());
        assert!(Message::parse(r#"{"a":"[[[\"[[\\"}"#).is_ok());
    }

    #[test]
    fn members_are_read_forgivingly() {
        let message =
            Message::parse(r#" {"id":1,"method":7,"id":1.50,"method":"ping","x":1e400,"params":[1]} "#).unwrap();
        assert_eq!((message.id, message.method.as_deref(), message.params), (Some("1.50"), Some("ping"), Some("[1]")));
        let message = Message::parse(r#"{"id":null,"method":7,"params":null}"#).unwrap();
        assert_eq!((message.id, message.method, message.params), (None, None, None));
    }

    #[test]
    fn ids_are_echoed_as_they_were_written() {
        for id in ["1.0e2", "99999999999999999999", "-0", "\"\\u0041\""] {
            assert_eq!(echoed(id), id);
        }
        for id in ["true", "{}", "[1]"] {
            assert_eq!(echoed(id), "null");
        }
    }
}
