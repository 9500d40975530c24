//! A frame from an app while a call is in flight: only a frame that names the call ends it, once; what the client
//! gets is a valid answer whatever the app wrote; and the bridge goes on.

use bytes::Bytes;
use openclaw_mcp_proxy::jsonrpc::{Meta, Params};
use openclaw_mcp_proxy::mcp;
use openclaw_mcp_proxy::protocol::{Answer, BadFrame, FromApp, SessionId};
use openclaw_mcp_proxy::proxy::bridge::Received;
use serde_json::Value;

use super::world::{SESSION, World, headers_for};
use super::{DEPTH, assert_slice, depth, json, oracle};

/// Checks one frame.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let value = oracle(text);
    let frame = FromApp::parse(text, DEPTH);
    match &frame {
        Ok(frame) => read(text, frame, &value.expect("what is accepted is JSON")),
        Err(bad) => assert!(!bad.message.is_empty() && !bad.message.chars().any(char::is_control)),
    }
    for (is_featured, tool, modern) in
        [(false, "echo", false), (false, "strict", true), (true, "any", true), (true, "strict", false)]
    {
        receive(text, &frame, is_featured, tool, modern);
    }
}

/// What was read is what serde_json reads, and what is relayed is the app's own text.
fn read(text: &str, frame: &FromApp<'_>, value: &Value) {
    assert!(depth(value) <= DEPTH);
    let relayed = |part: &str, value: &Value| {
        assert_slice(part, text);
        assert_eq!(&json(part), value);
    };
    let either = |names: [&str; 2]| names.map(|name| value[name].clone());
    match frame {
        FromApp::Pong => assert_eq!(value["type"], "pong"),
        FromApp::Progress { call, progress } => {
            assert_eq!(value["type"], "tool_progress");
            assert!(either(["request_id", "requestId"]).contains(&Value::from(&*call.request_id)));
            relayed(progress.progress, &value["progress"]);
            assert!(value["progress"].is_number());
        }
        FromApp::UpdateTools { tools } => relayed(tools, &value["tools"]),
        FromApp::Result { call, answer } => {
            assert_eq!(value["type"], "invoke_result");
            assert!(either(["request_id", "requestId"]).contains(&Value::from(&*call.request_id)));
            let id = SessionId::parse(SESSION).expect("it is one");
            if let Some(number) = call.number_in(id) {
                assert_eq!(call.request_id, format!("{SESSION}:{number}"), "a call is named as we named it");
            }
            match answer {
                Answer::Content("{}") => {}
                Answer::Content(content) => relayed(content, &value["content"]),
                Answer::Result(result) => relayed(result, &value["result"]),
                Answer::Failed(error) => assert!(
                    value["error"] == **error || value["error"]["message"] == **error || error == "Tool call failed."
                ),
                Answer::RpcError { code, data, .. } => {
                    assert_eq!(value["error"]["code"], *code);
                    assert!(data.is_none_or(|data| json(data) == value["error"]["data"]));
                }
                Answer::UnknownRequest => assert_eq!(value["error"]["code"], "unknown_request"),
            }
        }
    }
}

fn receive(text: &str, frame: &Result<FromApp<'_>, BadFrame<'_>>, is_featured: bool, tool: &str, modern: bool) {
    let features = if is_featured { r#"["resume","progress","cancel","tools","deadline"]"# } else { "[]" };
    let world = World::new(features);
    let mut call = serde_json::json!({ "method": "tools/call", "params": { "name": tool } });
    if modern {
        call["params"]["_meta"] = serde_json::json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28" });
    }
    let (headers, name) = (headers_for(&call), format!("\"{tool}\""));
    let meta = modern.then(|| Meta {
        text: "{}",
        protocol_version: Some("\"2026-07-28\""),
        client_capabilities: Some("{}"),
        ..Meta::default()
    });
    let params = Params { name: Some(&name), meta, ..Params::default() };
    let request =
        mcp::Request { id: "1", method: "tools/call", params: &params, headers: &headers, accepts_stream: false };
    let id = SessionId::parse(SESSION).expect("it is one");
    let mut ended_by_frame = false;
    let (_, answer) = world.ask(&request, |world, sent| {
        if sent["type"] == "hello" {
            return;
        }
        assert_eq!(sent["type"], "invoke_tool");
        let in_flight = || world.bridge.calls_in_flight();
        // An earlier socket's words count for nothing.
        let stale = Bytes::copy_from_slice(text.as_bytes());
        let copy = std::str::from_utf8(&stale).expect("it is a copy of a text");
        assert_eq!(world.bridge.receive(world.epoch - 1, &stale, copy, Ok(None), world.now), Received::Done);
        assert_eq!(in_flight(), 1);

        let received = world.say(text);
        ended_by_frame = in_flight() == 0;
        match frame {
            Ok(FromApp::Result { call, .. }) => assert_eq!(call.number_in(id) == Some(1), ended_by_frame),
            Ok(FromApp::UpdateTools { .. }) => {
                assert!(!ended_by_frame && matches!(received, Received::UpdateTools(_)) == is_featured);
            }
            Ok(_) => assert!(!ended_by_frame),
            Err(_) => {
                assert!(matches!(received, Received::Bad(_)));
                assert!(!ended_by_frame || text.contains(SESSION), "it named the call");
            }
        }
        world.say(text);
        assert_eq!(in_flight() == 0, ended_by_frame, "said again, it changes nothing");
        let request_id = &sent["request_id"];
        world.say(&format!(r#"{{"type":"invoke_result","request_id":{request_id},"ok":true,"content":{{"x":1}}}}"#));
        assert_eq!(in_flight(), 0);
    });
    assert_eq!((&answer["jsonrpc"], &answer["id"]), (&"2.0".into(), &1.into()));
    let result = &answer["result"];
    if !ended_by_frame {
        assert_eq!(result["structuredContent"]["x"], 1, "{answer}");
    }
    if result.is_null() {
        assert!(answer["error"]["code"].is_i64() && answer["error"]["message"].is_string(), "{answer}");
    } else if result["resultType"] != "input_required" {
        // What the strictest clients check.
        let blocks = result["content"].as_array().expect("a result has content");
        assert!(blocks.iter().all(|block| block["type"].is_string()), "{answer}");
        let is_error = result["isError"] == true;
        assert!(tool != "strict" || is_error || result["structuredContent"].is_object(), "{answer}");
        assert!(modern || result.get("structuredContent").is_none_or(Value::is_object), "{answer}");
    }
    assert_eq!(world.bridge.calls_in_flight(), 0);
    assert_eq!(world.next_frame(), None);
}
