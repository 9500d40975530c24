//! The bridge: closing codes, results of every shape, losses, takeovers, liveness.

use std::time::Duration;

use futures_util::SinkExt;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::support::{App, Bridge, TestServer, http, send, soon, timed, tools, until};

/// An app with its bridge connected.
async fn connected(server: &TestServer) -> (App, Bridge) {
    let app = App::register(server).await;
    let bridge = app.connect().await;
    (app, bridge)
}

#[tokio::test]
async fn refusals_close_after_the_upgrade_with_a_code() {
    let server = TestServer::start(&[("APP_TOKEN", "app-secret")]).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "app-secret").await;
    let mut wrong = App { token: "wrong".into(), ..app.clone() }.dial().await;
    assert_eq!(wrong.closed().await, (4401, "The app token is missing or not valid.".into()));
    let mut none = App { token: String::new(), ..app.clone() }.dial().await;
    assert_eq!(none.closed().await.0, 4401);
    for id in ["0123456789abcdef0123456789abcdef", "x", "%00", &app.id.to_uppercase()] {
        let unknown = App { bridge_url: app.bridge_url.replace(&app.id, id), ..app.clone() };
        assert_eq!(unknown.dial().await.closed().await.0, 4404, "{id}");
    }
    app.connect().await;
}

#[tokio::test]
async fn a_browser_sends_its_token_as_a_subprotocol() {
    let server = TestServer::start(&[("APP_TOKEN", "app-secret")]).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "app-secret").await;
    let dial = async |protocols: &str| {
        let mut request = app.bridge_url.as_str().into_client_request().unwrap();
        request.headers_mut().insert("sec-websocket-protocol", protocols.parse().unwrap());
        soon(tokio_tungstenite::connect_async(request)).await.unwrap()
    };
    // base64url of "app-secret"
    let (socket, response) = dial("openclaw-bridge, bearer.YXBwLXNlY3JldA").await;
    assert_eq!(response.headers()["sec-websocket-protocol"], "openclaw-bridge");
    app.wait_connected(true).await;
    drop(socket);
    app.wait_connected(false).await;
    let (socket, _) = dial("openclaw-bridge, bearer.d3Jvbmc").await;
    assert_eq!(Bridge { id: String::new(), socket }.closed().await.0, 4401);
}

#[tokio::test]
async fn a_plain_request_to_the_bridge_is_told_to_upgrade() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let reply = send(http().get(app.bridge_url.replace("ws://", "http://"))).await;
    assert_eq!(reply.status, 426);
    assert!(reply.json()["detail"].as_str().unwrap().contains("Upgrade"));
}

#[tokio::test]
async fn invoke_tool_has_the_seeds_members_and_numbers_start_at_one() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    for n in 1..=3 {
        let call = app.client().spawn_call("7", "echo", r#"{"text":"hello"}"#);
        let frame = bridge.recv().await;
        let request_id = format!("{}:{n}", app.id);
        let expected = json!({
            "type": "invoke_tool", "mcpSessionId": app.id, "request_id": request_id,
            "tool_name": "echo", "arguments": { "text": "hello" },
        });
        assert_eq!(frame, expected);
        bridge.answer(&request_id, r#""ok":true,"content":{"echoed_text":"hello"}"#).await;
        call.await.unwrap();
    }
    // A call without arguments is sent an empty object.
    let call = tokio::spawn({
        let client = app.client();
        async move { client.rpc("1", "tools/call", r#"{"name":"echo"}"#).await }
    });
    let (request_id, _, arguments) = bridge.invoked().await;
    assert_eq!(arguments, json!({}));
    bridge.answer(&request_id, r#""ok":true"#).await;
    call.await.unwrap();
}

#[tokio::test]
async fn every_kind_of_answer_becomes_a_result() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    let mut result = async |members: &str| {
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(members).await;
        let reply = call.await.unwrap();
        assert_eq!(reply.status, 200);
        reply.json()["result"].clone()
    };
    let text = |text: &str| json!([{ "type": "text", "text": text }]);
    assert_eq!(
        result(r#""ok":true,"content":{"b":1,"a":[]}"#).await,
        json!({ "content": text("{\n  \"b\": 1,\n  \"a\": []\n}"), "structuredContent": { "b": 1, "a": [] }, "isError": false })
    );
    assert_eq!(
        result(r#""ok":true,"content":"a \"b\" \n""#).await,
        json!({ "content": text("a \"b\" \n"), "isError": false })
    );
    assert_eq!(result(r#""ok":true,"content":[1, "x"]"#).await["content"], text("[\n  1,\n  \"x\"\n]"));
    assert_eq!(result(r#""ok":true,"content":1E2"#).await["content"], text("1E2"));
    assert_eq!(result(r#""ok":true,"content":false"#).await["content"], text("false"));
    for absent in [r#""ok":true"#, r#""ok":true,"content":null"#] {
        assert_eq!(result(absent).await, json!({ "content": text("{}"), "structuredContent": {}, "isError": false }));
    }
    let failed = |message: &str| json!({ "content": text(message), "isError": true });
    assert_eq!(result(r#""ok":false,"error":"No disk.""#).await, failed("No disk."));
    assert_eq!(result(r#""ok":false"#).await, failed("Tool call failed."));
    assert_eq!(result(r#""ok":false,"error":null"#).await, failed("Tool call failed."));
    assert_eq!(result(r#""ok":false,"error":{"code":"busy","message":"Later."}"#).await, failed("Later."));
    let whole = r#"{"content":[{"type":"text","text":"t"},{"type":"image","data":"aGk=","mimeType":"image/png"},
        {"type":"audio","data":"aGk=","mimeType":"audio/wav"},{"type":"resource_link","uri":"x:y","name":"n"},
        {"type":"resource","resource":{"uri":"x:y","text":"t"}},{"type":"resource","resource":{"uri":"x:y","blob":"aGk="}}],
        "structuredContent":{"n":1},"isError":false,"_meta":{"k":1},"vendor":[1]}"#;
    assert_eq!(
        result(&format!(r#""result":{whole}"#)).await,
        serde_json::from_str::<serde_json::Value>(whole).unwrap()
    );
    assert_eq!(result(r#""result":{"isError":true}"#).await, json!({ "content": [], "isError": true }));
    assert_eq!(result(r#""result":{}"#).await, json!({ "content": [] }));
    assert_eq!(
        result(r#""result":{"content":[],"structuredContent":{"a":1}}"#).await,
        json!({ "content": text("{\n  \"a\": 1\n}"), "structuredContent": { "a": 1 } })
    );
}

#[tokio::test]
async fn a_malformed_answer_fails_its_call_and_says_what_is_wrong() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    for (members, says) in [
        (r#""ok":1"#, "'ok' must be true or false"),
        (r#""content":1"#, "'ok'"),
        (r#""ok":false,"error":[1]"#, "'error'"),
        (r#""ok":true,"content":1e400"#, "does not fit a double"),
        (r#""ok":true,"content":"\ud800""#, "surrogate"),
        (r#""ok":true,"content":{"a":}"#, "invalid JSON"),
        (r#""result":[1]"#, "object"),
        (r#""result":{"content":{}}"#, "content must be an array"),
        (r#""result":{"content":[{"type":"video"}]}"#, "content[0]: type"),
        (r#""result":{"content":[{"type":"text","text":"x"},{"type":"image","data":"aGk="}]}"#, "content[1]: mimeType"),
        (r#""result":{"content":[{"type":"image","data":"a_k-","mimeType":"image/png"}]}"#, "Base64"),
        (r#""result":{"content":[{"type":"resource","resource":{"uri":"x"}}]}"#, "resource"),
        (r#""result":{"content":[],"isError":"no"}"#, "isError"),
        (r#""result":{"content":[],"content":[]}"#, "twice"),
        (r#""result":{"resultType":"input_required","inputRequests":{}}"#, "asks for input"),
    ] {
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(members).await;
        let reply = call.await.unwrap();
        assert!(reply.is_tool_error(), "{members}: {}", reply.text);
        assert!(reply.tool_text().contains(says), "{members}: {}", reply.text);
    }
    let deep = format!(r#""ok":true,"content":{}{}"#, "[".repeat(64), "]".repeat(64));
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(&deep).await;
    assert!(call.await.unwrap().tool_text().contains("64 levels"));
    // The bridge has lived through all of it.
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":"fine""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "fine");
}

#[tokio::test]
async fn what_is_no_result_ends_no_call() {
    let server = TestServer::start(&[("MAX_PROGRESS_BYTES", "100")]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["progress"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let params = r#"{"name":"slow","_meta":{"progressToken":1}}"#;
    let call = tokio::spawn(async move { client.rpc("1", "tools/call", params).await });
    let request_id = bridge.recv().await["request_id"].as_str().unwrap().to_owned();
    let long = "x".repeat(97);
    for (frame, is_bad) in [
        (json!({ "type": "tool_progress", "request_id": request_id, "progress": "50%" }), true),
        (json!({ "type": "tool_progress", "request_id": request_id, "progress": 1, "message": 5 }), true),
        (json!({ "type": "tool_log", "request_id": request_id, "text": "of a newer app" }), true),
        (json!({ "type": "tool_progress", "request_id": request_id, "progress": 2, "message": long }), false),
        (
            json!({ "type": "tool_progress", "request_id": request_id, "progress": 3, "message": format!("{long}x") }),
            true,
        ),
    ] {
        bridge.send(frame.clone()).await;
        if is_bad {
            let error = bridge.recv().await;
            assert_eq!(error["type"], "error", "{frame}");
        }
    }
    bridge.answer(&request_id, r#""ok":true,"content":"the result""#).await;
    let reply = call.await.unwrap();
    assert!(reply.text.contains("the result") && reply.text.contains(&long) && !reply.text.contains("\"progress\":3"));
}

#[tokio::test]
async fn an_apps_error_message_is_held_to_the_limit_of_results() {
    let server = TestServer::start(&[("MAX_RESULT_BYTES", "1024")]).await;
    let (app, mut bridge) = connected(&server).await;
    for members in [r#""error":{"code":7,"message":"M"}"#, r#""error":"M""#] {
        for (bytes, is_large) in [(900, false), (1025, true)] {
            let call = app.client().spawn_call("1", "echo", "{}");
            bridge.answer_next(&format!(r#""ok":false,{}"#, members.replace('M', &"x".repeat(bytes)))).await;
            let reply = call.await.unwrap();
            assert_eq!(reply.text.contains("the limit is 1024"), is_large, "{}", reply.text);
            assert!(reply.text.len() < 1200);
        }
    }
}

#[tokio::test]
async fn an_app_that_sends_slowly_is_alive() {
    let settings = [("PING_SECONDS", "0.3"), ("PROBE_SECONDS", "0.3")];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    let path = app.bridge_url.split_once("127.0.0.1").unwrap().1.split_once('/').unwrap().1;
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let handshake = format!(
        "GET /{path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(handshake.as_bytes()).await.unwrap();
    app.wait_connected(true).await;
    let call = app.client().spawn_call("1", "slow", "{}");
    until(async || app.status().await.json()["calls_in_flight"] == 1).await;
    // One frame that takes five ping intervals. No pong can be sent within it.
    let id = &app.id;
    let content = "x".repeat(3000);
    let result = format!(
        r#"{{"type":"invoke_result","mcpSessionId":"{id}","request_id":"{id}:1","ok":true,"content":"{content}"}}"#
    );
    let length = u16::try_from(result.len()).unwrap().to_be_bytes();
    let mut frame = vec![0x81, 0x80 | 126, length[0], length[1], 0, 0, 0, 0];
    frame.extend_from_slice(result.as_bytes());
    let (reader, mut writer) = stream.into_split();
    let mut newcomer = None;
    for (at, piece) in frame.chunks(100).enumerate() {
        writer.write_all(piece).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        if at == 10 {
            // Another bridge that wants its place sees that it is alive.
            let app = app.clone();
            newcomer = Some(tokio::spawn(async move { app.dial().await.closed().await.0 }));
        }
    }
    assert!(soon(call).await.unwrap().text.contains(&content));
    assert_eq!(newcomer.unwrap().await.unwrap(), 4409);
    drop((reader, writer));
}

#[tokio::test]
async fn a_refused_bridge_takes_no_memory() {
    use tokio::io::AsyncReadExt;
    let server = TestServer::start(&[("APP_TOKEN", "app-secret")]).await;
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let path = "/v1/chat/sessions/0123456789abcdef0123456789abcdef/bridge";
    let handshake = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(handshake.as_bytes()).await.unwrap();
    // A frame of 300 MB begins: some of it is thrown away, and nobody waits for its end.
    let mut frame = vec![0x82, 0x80 | 127];
    frame.extend_from_slice(&300_000_000_u64.to_be_bytes());
    frame.extend_from_slice(&[0; 4]);
    stream.write_all(&frame).await.unwrap();
    let mut written = 0;
    while written < 300_000_000 && stream.write_all(&[0; 65536]).await.is_ok() {
        written += 65536;
    }
    assert!(written < 60_000_000, "{written} bytes were taken");
    let _reset = soon(stream.read_to_end(&mut Vec::new())).await;
}

#[tokio::test]
async fn an_apps_json_rpc_error_is_passed_on() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    let call = app.client().spawn_call("\"x\"", "echo", "{}");
    bridge.answer_next(r#""ok":false,"error":{"code":-32602,"message":"No.","data":{"n":1E2}}"#).await;
    let reply = call.await.unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.text, r#"{"jsonrpc":"2.0","id":"x","error":{"code":-32602,"message":"No.","data":{"n":1E2}}}"#);
}

#[tokio::test]
async fn text_passes_unchanged_both_ways() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    for json in [
        r#"{"n":1E2,"d":0.1000000000000000055,"i":123456789012345678901234567890,"z":-0.0}"#,
        "{\"emoji\":\"\u{1f600}\",\"sep\":\"\u{2028}\u{2029}\",\"esc\":\"\\u0000\\ud83d\\ude00\\/\"}",
        r#"{ "spaced" : [ 1 , 2 ] ,"b":1,"a":{"":null}}"#,
    ] {
        let call = app.client().spawn_call("1", "echo", json);
        let frame = bridge.recv_text().await;
        let sent = frame.split_once(r#""arguments":"#).unwrap().1.strip_suffix('}').unwrap();
        assert_eq!(sent, json);
        let request_id =
            serde_json::from_str::<serde_json::Value>(&frame).unwrap()["request_id"].as_str().unwrap().to_owned();
        bridge.answer(&request_id, &format!(r#""ok":true,"content":{json}"#)).await;
        let reply = call.await.unwrap();
        assert!(reply.text.contains(&format!(r#""structuredContent":{json},"isError""#)), "{}", reply.text);
    }
}

#[tokio::test]
async fn an_app_may_be_called_as_soon_as_its_upgrade_is_answered() {
    let server = TestServer::start(&[]).await;
    for _ in 0..100 {
        let app = App::register(&server).await;
        let mut bridge = app.dial().await;
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(r#""ok":true,"content":"at once""#).await;
        assert_eq!(call.await.unwrap().tool_text(), "at once");
    }
}

#[tokio::test]
async fn without_a_bridge_calls_fail_at_once_and_lists_work() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let (reply, took) = timed(app.client().call("echo", "{}")).await;
    assert_eq!(reply.status, 200);
    assert!(reply.is_tool_error() && reply.tool_text() == "Bridge is not connected.");
    assert!(took < Duration::from_secs(1));
    let list = app.client().rpc("1", "tools/list", "{}").await.json();
    assert_eq!(list["result"]["tools"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_bridge_that_goes_ends_its_calls_at_once() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    let calls: Vec<_> = (0..3).map(|n| app.client().spawn_call(&n.to_string(), "slow", "{}")).collect();
    for _ in 0..3 {
        bridge.invoked().await;
    }
    drop(bridge);
    for call in calls {
        let (reply, took) = timed(call).await;
        let reply = reply.unwrap();
        assert_eq!(reply.status, 200);
        assert!(reply.is_tool_error());
        assert_eq!(reply.tool_text(), "Bridge disconnected before the tool answered.");
        assert!(took < Duration::from_secs(1));
    }
    assert_eq!(app.client().call("echo", "{}").await.tool_text(), "Bridge is not connected.");
    // The session is still there, and the app comes back.
    app.connect().await.echo();
    assert!(!app.client().call("echo", "{}").await.is_tool_error());
}

#[tokio::test]
async fn late_duplicate_and_foreign_results_are_ignored() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.2")]).await;
    let (app, mut bridge) = connected(&server).await;
    let (other, mut other_bridge) = connected(&server).await;

    // Late: the call has timed out.
    let call = app.client().spawn_call("1", "slow", "{}");
    let (late, _, _) = bridge.invoked().await;
    let reply = call.await.unwrap();
    assert_eq!(reply.tool_text(), "Tool call timed out after 0.2 s.");
    bridge.answer(&late, r#""ok":true,"content":"late""#).await;

    // Foreign: another session's bridge names this call, in every way it can.
    let call = app.client().spawn_call("1", "echo", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    let forged = |session: &str, request: &str| json!({ "type": "invoke_result", "mcpSessionId": session, "request_id": request, "ok": true, "content": "forged" });
    other_bridge.send(forged(&app.id, &request_id)).await;
    other_bridge.send(forged(&other.id, &request_id)).await;
    other_bridge
        .send(json!({ "type": "invoke_result", "request_id": request_id, "ok": true, "content": "forged" }))
        .await;
    // This bridge, but with another session's name, an unknown number, or no number at all.
    bridge.send(forged(&other.id, &request_id)).await;
    bridge.send(forged(&app.id, &format!("{}:999", app.id))).await;
    bridge.send(forged(&app.id, &app.id)).await;
    bridge.answer(&request_id, r#""ok":true,"content":"first""#).await;
    bridge.answer(&request_id, r#""ok":true,"content":"second""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "first");

    // Both bridges have lived through it, and the late answers reached nobody.
    for (app, bridge) in [(&app, &mut bridge), (&other, &mut other_bridge)] {
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(r#""ok":true,"content":"own""#).await;
        assert_eq!(call.await.unwrap().tool_text(), "own");
    }
}

#[tokio::test]
async fn bad_frames_cost_nothing_until_there_are_too_many() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let bad = [
        "",
        "{",
        "[]",
        "1",
        "null",
        "{}",
        r#"{"type":"x"}"#,
        r#"{"type":1}"#,
        r#"{"type":"invoke_result"}"#,
        r#"{"type":"invoke_result","request_id":1,"ok":true}"#,
    ];
    for frame in bad.iter().chain(&bad[..9]) {
        bridge.send_text(*frame).await;
        let error = bridge.recv().await;
        assert_eq!(error["type"], "error");
        assert!(error["message"].as_str().unwrap().ends_with('.'), "{error}");
    }
    soon(bridge.socket.send(Message::binary(vec![1, 2]))).await.unwrap();
    assert!(bridge.recv().await["message"].as_str().unwrap().contains("text frames"));
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":"alive after 20""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "alive after 20");
    bridge.send_text("{").await;
    assert_eq!(bridge.closed().await.0, 1008);
}

#[tokio::test]
async fn an_app_that_opted_in_to_nothing_gets_no_error_frames() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    bridge.send_text("{").await;
    bridge.send(json!({ "type": "update_tools", "tools": [] })).await;
    let call = app.client().spawn_call("1", "echo", "{}");
    assert_eq!(bridge.recv().await["type"], "invoke_tool");
    drop(bridge);
    call.await.unwrap();
}

#[tokio::test]
async fn a_second_bridge_is_refused_while_the_first_is_alive() {
    let server = TestServer::start(&[]).await;
    let (app, bridge) = connected(&server).await;
    let echo = bridge.echo();
    let (closed, took) = timed(async { app.dial().await.closed().await }).await;
    assert_eq!(closed, (4409, "Another bridge of this session is connected.".into()));
    assert!(took < Duration::from_secs(1));
    assert!(!app.client().call("echo", "{}").await.is_tool_error());
    assert_eq!(app.status().await.json()["bridge"]["epoch"], 1);
    echo.abort();
}

#[tokio::test]
async fn a_second_bridge_takes_over_from_a_silent_one() {
    let server = TestServer::start(&[("PROBE_SECONDS", "0.3")]).await;
    // The first one never reads, so it answers no ping.
    let (app, mut silent) = connected(&server).await;
    let call = app.client().spawn_call("1", "slow", "{}");
    until(async || app.status().await.json()["calls_in_flight"] == 1).await;
    let (newcomer, took) = timed(async {
        let bridge = app.dial().await;
        until(async || app.status().await.json()["bridge"]["epoch"] == 2).await;
        bridge
    })
    .await;
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(call.await.unwrap().tool_text(), "Bridge disconnected before the tool answered.");
    newcomer.echo();
    assert!(!app.client().call("echo", "{}").await.is_tool_error());
    // What the old one still says is ignored, and its goodbye does not evict the new one.
    assert_eq!(silent.closed().await.0, 4409);
    drop(silent);
    assert!(!app.client().call("echo", "{}").await.is_tool_error());
    assert_eq!(app.status().await.json()["bridge"]["connected"], true);
}

#[tokio::test]
async fn of_many_newcomers_one_becomes_the_bridge() {
    let server = TestServer::start(&[("PROBE_SECONDS", "0.5")]).await;
    let app = App::register(&server).await;
    let sockets = futures_util::future::join_all((0..30).map(|_| app.dial())).await;
    // All are read, so all answer probes.
    let outcomes = sockets.into_iter().map(|mut bridge| async move {
        let code = tokio::time::timeout(Duration::from_secs(3), async { bridge.closed().await.0 }).await.ok();
        (code, bridge)
    });
    let outcomes = futures_util::future::join_all(outcomes).await;
    let count = |code| outcomes.iter().filter(|(outcome, _)| *outcome == code).count();
    assert_eq!((count(None), count(Some(4409))), (1, 29));
    assert_eq!(app.status().await.json()["bridge"]["connected"], true);
}

#[tokio::test]
async fn bridges_are_pinged_and_the_silent_are_closed() {
    let server = TestServer::start(&[("PING_SECONDS", "0.5")]).await;
    // The library answers WebSocket pings for as long as it is read.
    let (app, mut alive) = connected(&server).await;
    for _ in 0..3 {
        assert_eq!(alive.recv_text().await, r#"{"type":"ping"}"#);
    }
    assert_eq!(app.status().await.json()["bridge"]["connected"], true);
    let (silent, _unread) = connected(&server).await;
    let (_, took) = timed(silent.wait_connected(false)).await;
    // Two intervals of silence, and not three.
    assert!((900..1450).contains(&took.as_millis()), "{took:?}");
}

#[tokio::test]
async fn an_app_that_does_not_read_is_closed_and_hurts_nobody() {
    let server = TestServer::start(&[("WRITE_STALL_SECONDS", "1"), ("MAX_QUEUE_BYTES", "6000000")]).await;
    let (app, _unread) = connected(&server).await;
    let big = format!(r#"{{"x":"{}"}}"#, "x".repeat(3_000_000));
    // The kernel takes some megabytes before anything has to wait.
    let mut calls = tokio::task::JoinSet::new();
    let first = loop {
        assert!(calls.len() < 100, "nothing had to wait");
        calls.spawn(app.client().spawn_call("1", "echo", &big));
        if let Ok(Some(reply)) = tokio::time::timeout(Duration::from_millis(100), calls.join_next()).await {
            break reply;
        }
    };
    let mut replies = vec![first];
    replies.extend(soon(calls.join_all()).await.into_iter().map(Ok));
    for reply in replies {
        let reply = reply.unwrap().unwrap();
        let honest = ["Bridge disconnected before the tool answered.", "Bridge is not connected.", "Too much waits"];
        assert!(honest.iter().any(|text| reply.text.contains(text)), "{}", reply.text);
    }
    app.wait_connected(false).await;
}

#[tokio::test]
async fn deleting_mid_call_ends_the_call() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = connected(&server).await;
    let call = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    app.delete().await;
    let reply = call.await.unwrap();
    assert!(reply.is_tool_error());
    assert_eq!(reply.tool_text(), "Chat session was unregistered.");
    assert_eq!(bridge.closed().await, (1000, "The session was deleted.".into()));
}

#[tokio::test]
async fn a_result_over_the_limit_fails_its_call_and_only_it() {
    let limits = [("MAX_RESULT_BYTES", "100000"), ("MAX_BRIDGE_MESSAGE_BYTES", "400000")];
    let server = TestServer::start(&limits).await;
    let (app, mut bridge) = connected(&server).await;
    let string = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
    let mut call = async |content: String| {
        let waiting = app.client().spawn_call("1", "slow", "{}");
        let (kept, _, _) = bridge.invoked().await;
        let call = app.client().spawn_call("2", "echo", "{}");
        bridge.answer_next(&format!(r#""ok":true,"content":{content}"#)).await;
        let reply = call.await.unwrap();
        bridge.answer(&kept, r#""ok":true,"content":"kept""#).await;
        assert_eq!(waiting.await.unwrap().tool_text(), "kept");
        reply
    };
    let fits = call(string(99_800)).await;
    assert!(!fits.is_tool_error() && fits.text.len() <= 100_000);
    let too_large = call(string(100_001)).await;
    assert_eq!(too_large.tool_text(), "The tool's result takes 100001 bytes; the limit is 100000.");
    let barely = call(string(100_000)).await;
    assert!(barely.tool_text().contains("the limit is 100000"), "{}", barely.tool_text());
    // The text copy gives way before the data does.
    let object = call(format!(r#"{{"x":{}}}"#, string(80_000))).await;
    assert!(!object.is_tool_error());
    assert!(object.tool_text().contains("structuredContent"));
    assert_eq!(object.json()["result"]["structuredContent"]["x"].as_str().unwrap().len(), 79_998);
    // Over the hard cap it costs the socket.
    bridge.send_text(string(400_001)).await;
    assert_eq!(bridge.closed().await.0, 1009);
}

#[tokio::test]
async fn fragmented_messages_and_pings_in_between_are_fine() {
    use tokio::io::AsyncReadExt;
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let path = app.bridge_url.split_once("127.0.0.1").unwrap().1.split_once('/').unwrap().1;
    let handshake = format!(
        "GET /{path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    // The first frames travel with the handshake: a ping, and half of a pong frame of the app's.
    let frame = |first: u8, payload: &[u8]| {
        let mut frame = vec![first, 0x80 | u8::try_from(payload.len()).unwrap(), 0, 0, 0, 0];
        frame.extend_from_slice(payload);
        frame
    };
    let mut bytes = handshake.into_bytes();
    bytes.extend(frame(0x01, br#"{"type":"#));
    bytes.extend(frame(0x89, b"hello"));
    bytes.extend(frame(0x80, br#""pong"}"#));
    stream.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    soon(async {
        while !answer.windows(7).any(|window| window == b"\x8a\x05hello") {
            let mut buffer = [0; 1024];
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "closed: {}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&buffer[..read]);
        }
    })
    .await;
    assert!(answer.starts_with(b"HTTP/1.1 101 "));
    assert!(String::from_utf8_lossy(&answer).contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    app.wait_connected(true).await;
}
