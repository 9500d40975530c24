//! What apps do over HTTP: register, look at, change and delete sessions.

use serde_json::{Value, json};

use crate::support::{App, TestServer, http, send, tools};

async fn create(server: &TestServer, body: impl Into<String>) -> crate::support::Reply {
    let url = format!("{}/v1/chat/sessions", server.base);
    send(http().post(url).header("content-type", "application/json").body(body.into())).await
}

#[tokio::test]
async fn registration_answers_with_the_seeds_three_members() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let members: Vec<_> = app.registration.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, ["bridge_url", "mcpSessionId", "mcp_url"]);
    let id = &app.id;
    assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()), "{id}");
    assert_eq!(app.bridge_url, format!("ws://127.0.0.1:{}/v1/chat/sessions/{id}/bridge", server.port));
    assert_eq!(app.mcp_url, format!("http://127.0.0.1:{}/v1/mcp/{id}", server.port));
}

#[tokio::test]
async fn session_ids_do_not_repeat() {
    let server = TestServer::start(&[]).await;
    let mut ids = std::collections::HashSet::new();
    for _ in 0..200 {
        assert!(ids.insert(App::register(&server).await.id));
    }
}

#[tokio::test]
async fn urls_follow_a_trusted_proxy_or_the_setting() {
    let urls = async |settings: &[(&str, &str)], headers: &[(&str, &str)]| {
        let server = TestServer::start(settings).await;
        let mut request = http().post(format!("{}/v1/chat/sessions", server.base)).json(&json!({ "device_id": "d" }));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let reply = send(request).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let reply = reply.json();
        [reply["bridge_url"].as_str().unwrap().to_owned(), reply["mcp_url"].as_str().unwrap().to_owned()]
    };
    let forwarded = [("x-forwarded-proto", "https"), ("x-forwarded-host", "mcp.example")];
    let [bridge, mcp] = urls(&[], &forwarded).await;
    assert!(bridge.starts_with("wss://mcp.example/v1/chat/") && mcp.starts_with("https://mcp.example/v1/mcp/"));
    let [bridge, mcp] = urls(&[("TRUSTED_PROXIES", "10.0.0.0/8")], &forwarded).await;
    assert!(bridge.starts_with("ws://127.0.0.1:") && mcp.starts_with("http://127.0.0.1:"));
    let [bridge, mcp] = urls(&[("PUBLIC_URL", "https://p.example/x/")], &forwarded).await;
    assert!(bridge.starts_with("wss://p.example/x/v1/chat/") && mcp.starts_with("https://p.example/x/v1/mcp/"));
}

#[tokio::test]
async fn both_spellings_are_taken_and_frames_follow_the_registration() {
    let server = TestServer::start(&[]).await;
    let camel = json!({
        "deviceId": "d", "deviceName": "n", "appVersion": "1", "chatId": "c", "userId": "u",
        "tools": [{ "name": "echo", "inputSchema": { "type": "object" }, "path": "/x" }], "unknown": 1,
    });
    let app = App::register_with(&server, camel).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let frame = bridge.recv().await;
    let members: Vec<_> = frame.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(members, ["arguments", "mcpSessionId", "requestId", "toolName", "type"]);
    // Answers are taken in either spelling.
    bridge.answer(frame["requestId"].as_str().unwrap(), r#""ok":true,"content":"done""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "done");
}

#[tokio::test]
async fn a_bad_tool_refuses_the_whole_registration() {
    let server = TestServer::start(&[]).await;
    for (tool, says) in [
        (json!({ "name": "" }), "name"),
        (json!({ "name": "good" }), "tools[1] 'good': the name is given twice"),
        (json!({ "name": "x", "input_schema": { "type": "array" } }), "tools[1] 'x': input_schema"),
        (json!({ "name": "x", "input_schema": { "$ref": "http://127.0.0.1:9/" } }), "$ref"),
        (json!({ "name": "x", "description": 1 }), "description"),
        (json!({ "name": "x\u{7}" }), "control"),
    ] {
        let body = json!({ "device_id": "d", "tools": [{ "name": "good" }, tool] });
        let reply = create(&server, body.to_string()).await;
        assert_eq!(reply.status, 422, "{body}");
        let detail = reply.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(says), "{detail}");
    }
    assert_eq!(create(&server, "{}").await.status, 422);
    for bad in ["", "{", "{\"device_id\":\"d\",}", "\u{feff}{}", r#"{"device_id":"d","x":1e400}"#] {
        let reply = create(&server, bad).await;
        assert_eq!(reply.status, 400, "{bad}");
        assert!(reply.json()["detail"].is_string());
    }
    let not_utf8 = http().post(format!("{}/v1/chat/sessions", server.base)).header("content-type", "application/json");
    assert_eq!(send(not_utf8.body(&b"{\"device_id\":\"\xff\"}"[..])).await.status, 400);
    let text = http().post(format!("{}/v1/chat/sessions", server.base)).header("content-type", "text/plain").body("{}");
    assert_eq!(send(text).await.status, 415);
}

#[tokio::test]
async fn unusual_names_are_taken_with_a_warning() {
    let server = TestServer::start(&[]).await;
    let app = App::register_with(&server, json!({ "device_id": "d", "tools": tools(&["工具", "fine"]) })).await;
    assert_eq!(app.registration["warnings"].as_array().unwrap().len(), 1);
    app.connect().await.echo();
    assert!(!app.client().call("工具", "{}").await.is_tool_error());
}

#[tokio::test]
async fn the_app_may_look_at_its_session() {
    let server = TestServer::start(&[("SESSION_TTL_SECONDS", "100")]).await;
    let app = App::register(&server).await;
    let status = app.status().await.json();
    assert_eq!(status["mcpSessionId"], app.id.as_str());
    assert_eq!(status["bridge"], json!({ "connected": false, "since": null, "epoch": 0 }));
    assert_eq!((&status["tools"], &status["calls_in_flight"]), (&json!(2), &json!(0)));
    assert!((98..=100).contains(&status["expires_in_seconds"].as_u64().unwrap()));
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    let status = app.status().await.json();
    assert!(status["bridge"]["since"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!((&status["bridge"]["epoch"], &status["calls_in_flight"]), (&json!(1), &json!(1)));
    assert_eq!(status["expires_in_seconds"], Value::Null);
    bridge.answer(&request_id, r#""ok":true"#).await;
    call.await.unwrap();
    app.delete().await;
    assert_eq!(app.status().await.status, 404);
}

#[tokio::test]
async fn deleting_is_idempotent_and_closes_the_bridge() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    for _ in 0..2 {
        let reply = app.delete().await;
        assert_eq!((reply.status, reply.text.as_str()), (200, r#"{"ok":true}"#));
    }
    assert_eq!(bridge.closed().await.0, 1000);
    let unknown = send(http().delete(format!("{}/v1/chat/sessions/nonsense%2f..%00", server.base))).await;
    assert_eq!((unknown.status, unknown.text.as_str()), (200, r#"{"ok":true}"#));
    assert_eq!(app.client().rpc("1", "tools/list", "{}").await.status, 404);
    assert_eq!(app.dial().await.closed().await.0, 4404);
}

#[tokio::test]
async fn tools_can_be_replaced_all_or_none() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let put = async |body: Value| send(http().put(format!("{}/tools", app.session_url())).json(&body)).await;
    let names = async || {
        let list = app.client().rpc("1", "tools/list", "{}").await.json();
        list["result"]["tools"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(put(json!({ "tools": tools(&["new"]) })).await.status, 200);
    assert_eq!(names().await, ["new"]);
    assert_eq!(put(json!({ "tools": [{ "name": "a" }, { "name": "a" }] })).await.status, 422);
    assert_eq!(put(json!({})).await.status, 422);
    assert_eq!(names().await, ["new"]);
    app.delete().await;
    assert_eq!(put(json!({ "tools": [] })).await.status, 404);
}

#[tokio::test]
async fn health_is_plain_ok_and_other_paths_are_json_errors() {
    let server = TestServer::start(&[]).await;
    let health = send(http().get(format!("{}/health", server.base))).await;
    assert_eq!((health.status, health.text.as_str()), (200, "ok"));
    assert!(health.header("content-type").unwrap().starts_with("text/plain"));
    let nothing = send(http().get(format!("{}/nothing", server.base))).await;
    assert_eq!(nothing.status, 404);
    assert!(nothing.json()["detail"].is_string());
    let method = send(http().get(format!("{}/v1/chat/sessions", server.base))).await;
    assert_eq!(method.status, 405);
    assert!(method.json()["detail"].is_string());
}
