//! A client's message: it is read as serde_json reads it, what is relayed is its own text, and whatever it asks is
//! answered once, with its id.

use openclaw_mcp_proxy::json::{as_string, members};
use openclaw_mcp_proxy::jsonrpc::{self, INVALID_PARAMS, INVALID_REQUEST, MAX_ID_BYTES, Message, PARSE_ERROR, Params};
use openclaw_mcp_proxy::mcp;
use serde_json::Value;

use super::world::{SESSION, World, headers_for};
use super::{DEPTH, assert_slice, depth, json, oracle};

/// Checks one message.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let value = oracle(text);
    match Message::parse(text, DEPTH) {
        Ok(message) => accepted(text, &message, &value.expect("what is accepted is JSON")),
        Err(invalid) => {
            refused(text, &invalid, value.as_ref());
            if let Some(value) = value.filter(is_good) {
                // Written anew, nothing is given twice any more, and no exponent is left to be squinted at.
                let text = value.to_string();
                assert!(Message::parse(&text, DEPTH).is_ok(), "{text}");
            }
        }
    }
}

fn accepted(text: &str, message: &Message<'_>, value: &Value) {
    assert_eq!(value["jsonrpc"], "2.0");
    assert!(depth(value) <= DEPTH);
    match message {
        Message::Response => assert!(value.get("method").is_none()),
        Message::Notification { method, params } => {
            assert_eq!((value["method"].as_str(), value.get("id")), (Some(&**method), None));
            relayed(text, params, &value["params"]);
        }
        Message::Request { id, method, params } => {
            assert_slice(id, text);
            assert_eq!((value["method"].as_str(), &json(id)), (Some(&**method), &value["id"]));
            relayed(text, params, &value["params"]);
            answered(id, method, params, value);
        }
    }
}

/// What goes on to the app is what was sent, byte for byte.
fn relayed(text: &str, params: &Params<'_>, value: &Value) {
    let meta = params.meta.as_ref();
    for (part, name) in [
        (params.arguments, "arguments"),
        (params.name, "name"),
        (params.request_id, "requestId"),
        (params.cursor, "cursor"),
        (params.input_responses, "inputResponses"),
        (params.request_state, "requestState"),
        (params.notifications, "notifications"),
        (meta.map(|meta| meta.text), "_meta"),
    ] {
        match part {
            Some(part) => {
                assert_slice(part, text);
                assert_eq!(json(part), value[name], "{name}");
            }
            None => assert!(value[name].is_null() || name == "_meta", "{name}"),
        }
    }
}

fn answered(id: &str, method: &str, params: &Params<'_>, value: &Value) {
    let world = World::new(r#"["context","deadline"]"#);
    let headers = headers_for(value);
    let request = mcp::Request { id, method, params, headers: &headers, accepts_stream: true };
    let (mut calls, mut echoed) = (0, Value::Null);
    let (status, answer) = world.ask(&request, |world, frame| {
        calls += 1;
        assert_eq!((frame["type"].as_str(), &frame["mcpSessionId"]), (Some("invoke_tool"), &SESSION.into()));
        assert_eq!(frame["tool_name"].as_str(), params.name.and_then(as_string).as_deref());
        assert_eq!(frame["arguments"], json(params.arguments.unwrap_or("{}")));
        let request_id = &frame["request_id"];
        let content = params.arguments.unwrap_or("{}");
        echoed = json(content);
        world.say(&format!(r#"{{"type":"invoke_result","request_id":{request_id},"ok":true,"content":{content}}}"#));
    });
    assert!(calls <= 1 && world.bridge.calls_in_flight() == 0);
    if answer.is_null() {
        return assert_eq!(method, "subscriptions/listen");
    }
    assert!(status.is_success() || status.is_client_error(), "{status}");
    assert_eq!((&answer["jsonrpc"], &answer["id"]), (&"2.0".into(), &json(id)));
    assert!(answer["result"].is_object() != answer["error"].is_object(), "{answer}");
    if calls == 1 {
        assert_eq!(answer["result"]["structuredContent"], echoed, "{answer}");
        let text = answer["result"]["content"][0]["text"].as_str().expect("it has a text");
        assert_eq!(json(text), echoed);
    }
}

fn refused(text: &str, invalid: &jsonrpc::Invalid<'_>, value: Option<&Value>) {
    assert!([PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS].contains(&invalid.code));
    assert!(invalid.code != PARSE_ERROR || value.is_none(), "JSON is no parse error");
    let answer = json(jsonrpc::error(invalid.id, invalid.code, &invalid.message, None));
    assert!(!invalid.message.chars().any(char::is_control));
    if let Some(id) = invalid.id {
        assert_slice(id, text);
        assert!(answer["id"].is_string() || answer["id"].is_number());
        // Of what serde_json can read, the id is no guess, unless there are several.
        let mut ids = 0;
        let _cut_short = members(text, |name, _| ids += usize::from(name == "id"));
        assert!(ids > 1 || value.is_none_or(|value| value["id"] == answer["id"]), "{answer}");
    }
}

/// A message that must be accepted if nothing in it is given twice.
fn is_good(value: &Value) -> bool {
    let has_id = match &value["id"] {
        Value::Null => value.get("id").is_none(),
        Value::String(id) => id.len() < MAX_ID_BYTES / 6,
        id => id.is_i64() || id.is_u64(),
    };
    let params = &value["params"];
    let is_message = value["method"].is_string() && (params.is_null() || params.is_object());
    value["jsonrpc"] == "2.0" && is_message && has_id && depth(value) <= DEPTH
}
