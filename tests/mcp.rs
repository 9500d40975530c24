//! The MCP endpoint, request by request, as clients of every version send them.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::{App, McpClient, TestServer, http, send, soon, timed, tools, until};

async fn echo_app(server: &TestServer) -> App {
    let app = App::register(server).await;
    app.connect().await.echo();
    app
}

#[tokio::test]
async fn both_routes_serve_and_the_path_wins() {
    let server = TestServer::start(&[]).await;
    let (one, two) = (echo_app(&server).await, App::register(&server).await);
    let bare = |path: &str| McpClient::new(&format!("{}{path}", server.base));
    for client in [
        one.client(),
        McpClient::new(&format!("{}/", one.mcp_url)),
        bare("/v1/mcp").header("MCP-Session-Id", &one.id),
        bare("/v1/mcp/").header("mcp-session-id", &format!(" {} ", one.id)),
        bare("/v1/mcp").header("X-OpenClaw-Session-Id", &one.id),
        bare("/v1/mcp").header("MCP-Session-Id", &format!("{0}, {0}", one.id)),
        bare("/v1/mcp").header("MCP-Session-Id", &one.id).header("X-OpenClaw-Session-Id", &one.id),
        one.client().header("MCP-Session-Id", &two.id),
        one.client().header("MCP-Session-Id", "srv-7"),
        // Ours wins where a library or a gateway has taken the other for itself.
        bare("/v1/mcp").header("MCP-Session-Id", "srv-7").header("X-OpenClaw-Session-Id", &one.id),
    ] {
        let reply = client.call("echo", r#"{"a":1}"#).await;
        assert_eq!(reply.json()["result"]["structuredContent"], json!({ "a": 1 }), "{:?}", client.headers);
    }
    let conflict = bare("/v1/mcp").header("MCP-Session-Id", &format!("{}, {}", one.id, two.id));
    let reply = conflict.rpc("7", "tools/list", "{}").await;
    assert_eq!((reply.status, &reply.json()["id"]), (400, &json!(7)));
}

#[tokio::test]
async fn an_unknown_session_and_a_missing_one_are_told_apart() {
    let server = TestServer::start(&[]).await;
    let unknown = "0123456789abcdef0123456789abcdef";
    let by_path = McpClient::new(&format!("{}/v1/mcp/{unknown}", server.base));
    let bare = McpClient::new(&format!("{}/v1/mcp", server.base));
    let by_header = bare.clone().header("MCP-Session-Id", unknown);
    let by_alias = bare.clone().header("X-OpenClaw-Session-Id", unknown);
    for (client, method, status) in [
        (&by_path, "tools/list", 404),
        (&by_path, "initialize", 404),
        (&by_path, "ping", 404),
        (&by_header, "tools/list", 404),
        (&by_header, "tools/call", 404),
        (&by_header, "initialize", 200),
        (&by_alias, "initialize", 404),
        (&by_alias, "ping", 404),
        (&by_header, "ping", 200),
        (&bare, "tools/list", 400),
        (&bare, "tools/call", 400),
        (&bare, "resources/list", 200),
        (&bare, "initialize", 200),
        (&bare, "ping", 200),
    ] {
        let reply = client.rpc("\"i\"", method, "{}").await;
        assert_eq!(reply.status, status, "{} {method}: {}", client.url, reply.text);
        assert_eq!(reply.json()["id"], "i");
        if status != 200 {
            assert_eq!(reply.json()["error"]["code"], status);
        }
    }
    let notification = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    assert_eq!(bare.post(notification).await.status, 202);
    assert_eq!(by_header.post(notification).await.status, 202);
    assert_eq!(by_path.post(notification).await.status, 404);
    for literal in ["${SESSION_ID}", "$%7BSESSION_ID%7D"] {
        let by_path =
            McpClient::new(&format!("{}/v1/mcp/{}", server.base, literal.replace('{', "%7B").replace('}', "%7D")));
        let reply = by_path.rpc("1", "tools/list", "{}").await;
        assert!(reply.json()["error"]["message"].as_str().unwrap().contains("did not expand"), "{}", reply.text);
    }
    let reply = bare.clone().header("MCP-Session-Id", "${SESSION_ID}").rpc("1", "tools/list", "{}").await;
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("did not expand"));
    for odd in ["a%2fb", "%00", "%ff", "..", &"x".repeat(5000), "0123456789ABCDEF0123456789ABCDEF"] {
        let client = McpClient::new(&format!("{}/v1/mcp/{odd}", server.base));
        let status = client.rpc("1", "tools/list", "{}").await.status;
        assert!(matches!(status, 400 | 404), "{odd}: {status}");
    }
}

#[tokio::test]
async fn initialize_negotiates_each_legacy_version() {
    let server = TestServer::start(&[]).await;
    let app = App::register_with(
        &server,
        json!({ "device_id": "d", "device_name": "Desk", "instructions": "Be kind.", "tools": tools(&["echo"]) }),
    )
    .await;
    for (offered, answered) in [
        ("2024-11-05", "2024-11-05"),
        ("2025-03-26", "2025-03-26"),
        ("2025-06-18", "2025-06-18"),
        ("2025-11-25", "2025-11-25"),
        ("2026-07-28", "2025-11-25"),
        ("1999-01-01", "2025-11-25"),
    ] {
        let params = format!(
            r#"{{"protocolVersion":"{offered}","capabilities":{{}},"clientInfo":{{"name":"c","version":"1"}}}}"#
        );
        let reply = app.client().rpc("0", "initialize", &params).await;
        let expected = json!({
            "protocolVersion": answered,
            "capabilities": { "tools": {} },
            "serverInfo": { "name": "openclaw-mcp-proxy", "version": env!("CARGO_PKG_VERSION"), "title": "Desk" },
            "instructions": "Be kind.",
        });
        assert_eq!(reply.json(), json!({ "jsonrpc": "2.0", "id": 0, "result": expected }));
        assert_eq!(reply.header("content-type"), Some("application/json"));
    }
}

#[tokio::test]
async fn legacy_requests_of_every_version_are_served() {
    let server = TestServer::start(&[]).await;
    let app = echo_app(&server).await;
    for version in [None, Some("2024-11-05"), Some("2025-03-26"), Some("2025-06-18"), Some("2025-11-25")] {
        let mut client = app.client();
        if let Some(version) = version {
            client = client.header("MCP-Protocol-Version", version);
        }
        let list = client.post(r#"{"method":"tools/list","jsonrpc":"2.0","id":1}"#).await.json();
        assert_eq!(list["result"]["tools"].as_array().unwrap().len(), 2);
        assert!(list["result"].get("resultType").is_none());
        assert_eq!(client.rpc("2", "ping", "{}").await.json()["result"], json!({}));
        assert!(!client.call("echo", "{}").await.is_tool_error());
        for method in ["resources/list", "prompts/list", "logging/setLevel", "nonsense", "subscriptions/listen"] {
            let reply = client.rpc("3", method, "{}").await;
            assert_eq!((reply.status, &reply.json()["error"]["code"]), (200, &json!(-32601)), "{method}");
        }
    }
    let reply = app.client().header("MCP-Protocol-Version", "2025-01-01").rpc("1", "tools/list", "{}").await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32022)));
    assert_eq!(reply.json()["error"]["data"]["requested"], "2025-01-01");
    assert_eq!(reply.json()["error"]["data"]["supported"].as_array().unwrap().len(), 5);
}

#[tokio::test]
async fn modern_requests_are_self_describing() {
    let server = TestServer::start(&[]).await;
    let app = echo_app(&server).await;
    let client = app.client();
    let discover = client.modern("server/discover", json!({})).await;
    assert_eq!(discover.status, 200, "{}", discover.text);
    let result = discover.json()["result"].clone();
    assert_eq!(
        result["supportedVersions"],
        json!(["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"])
    );
    assert_eq!(
        (&result["resultType"], &result["ttlMs"], &result["cacheScope"]),
        (&json!("complete"), &json!(0), &json!("private"))
    );
    let list = client.modern("tools/list", json!({})).await.json()["result"].clone();
    assert_eq!(
        (&list["resultType"], &list["ttlMs"], &list["cacheScope"]),
        (&json!("complete"), &json!(0), &json!("private"))
    );
    assert_eq!(list["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "openclaw-mcp-proxy");
    let call =
        client.modern("tools/call", json!({ "name": "echo", "arguments": { "n": 1 } })).await.json()["result"].clone();
    assert_eq!((&call["resultType"], &call["structuredContent"]), (&json!("complete"), &json!({ "n": 1 })));
    assert_eq!(call["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "openclaw-mcp-proxy");
    for method in ["initialize", "ping", "logging/setLevel", "resources/list", "nonsense"] {
        let reply = client.modern(method, json!({})).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!(-32601)), "{method}");
        assert_eq!(reply.json()["id"], 1);
    }
    let unknown = client.modern("tools/call", json!({ "name": "nope" })).await;
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (200, &json!(-32602)));
    // The bare endpoint, whose client leaves the session header out of its handshake.
    let bare = McpClient::new(&format!("{}/v1/mcp", server.base));
    assert_eq!(bare.modern("server/discover", json!({})).await.status, 200);
    assert_eq!(bare.modern("tools/list", json!({})).await.status, 400);
}

#[tokio::test]
async fn modern_headers_must_say_what_the_body_says() {
    let server = TestServer::start(&[]).await;
    let app = App::register_with(
        &server,
        json!({ "device_id": "d", "tools": [{ "name": "echo", "input_schema": { "type": "object", "properties": {
            "region": { "type": "string", "x-mcp-header": "Region" }, "n": { "type": "integer", "x-mcp-header": "N" } } } }] }),
    )
    .await;
    app.connect().await.echo();
    let meta = json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {} });
    let post = async |headers: &[(&str, &str)], method: &str, params: Value| {
        let body = json!({ "jsonrpc": "2.0", "id": 5, "method": method, "params": params }).to_string();
        let mut request = app.client().request(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let reply = send(request).await;
        (reply.status, reply.json()["error"]["code"].as_i64().unwrap_or(0), reply.json()["id"].clone())
    };
    let version = ("mcp-protocol-version", "2026-07-28");
    let call = ("mcp-method", "tools/call");
    let name = ("mcp-name", "echo");
    let with = |arguments: Value| json!({ "name": "echo", "arguments": arguments, "_meta": meta });
    let refused = |code: i64| (400, code, json!(5));
    let served = (200, 0, json!(5));
    assert_eq!(post(&[version, call, name], "tools/call", with(json!({}))).await, served);
    assert_eq!(
        post(&[version, call, ("mcp-name", "=?base64?ZWNobw==?=")], "tools/call", with(json!({}))).await,
        served
    );
    for headers in [
        &[call, name][..],
        &[("mcp-protocol-version", "2025-11-25"), call, name],
        &[version, name],
        &[version, ("mcp-method", "tools/list"), name],
        &[version, ("mcp-method", "Tools/Call"), name],
        &[version, call],
        &[version, call, ("mcp-name", "other")],
        &[version, call, ("mcp-name", "=?base64?!?=")],
        &[version, call, call, name],
        &[version, version, call, name],
    ] {
        assert_eq!(post(headers, "tools/call", with(json!({}))).await, refused(-32020), "{headers:?}");
    }
    let region = ("mcp-param-region", "eu");
    let both = with(json!({ "region": "eu", "n": 42 }));
    assert_eq!(post(&[version, call, name, region, ("mcp-param-n", "42.0")], "tools/call", both.clone()).await, served);
    assert_eq!(post(&[version, call, name, region], "tools/call", both.clone()).await, refused(-32020));
    assert_eq!(post(&[version, call, name, region, ("mcp-param-n", "43")], "tools/call", both).await, refused(-32020));
    assert_eq!(post(&[version, call, name], "tools/call", with(json!({ "region": null }))).await, served);
    // The metadata itself.
    let list = ("mcp-method", "tools/list");
    for incomplete in [
        json!({}),
        json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28" }),
        json!({ "io.modelcontextprotocol/clientCapabilities": {} }),
        json!({ "io.modelcontextprotocol/protocolVersion": 1, "io.modelcontextprotocol/clientCapabilities": {} }),
    ] {
        assert_eq!(
            post(&[version, list], "tools/list", json!({ "_meta": incomplete })).await,
            refused(-32602),
            "{incomplete}"
        );
    }
    let future = json!({ "_meta": { "io.modelcontextprotocol/protocolVersion": "2099-01-01", "io.modelcontextprotocol/clientCapabilities": {} } });
    assert_eq!(post(&[("mcp-protocol-version", "2099-01-01"), list], "tools/list", future).await, refused(-32022));
    // A version that nobody knows says nothing of what else must be there.
    for unknown in ["2099-01-01", "2024-01-01", "nope"] {
        let answer = post(&[("mcp-protocol-version", unknown), list], "tools/list", json!({})).await;
        assert_eq!(answer, refused(-32022), "{unknown}");
    }
}

#[tokio::test]
async fn ids_keep_their_text_and_forbidden_ones_are_refused() {
    let server = TestServer::start(&[]).await;
    let app = echo_app(&server).await;
    for id in [
        "0",
        "\"\"",
        "-1",
        "9007199254740993",
        "1.0",
        "1E2",
        "\"\\u0041\"",
        "\"\u{1f600}\"",
        "123456789012345678901234567890",
    ] {
        for method in ["ping", "tools/list"] {
            let reply = app.client().rpc(id, method, "{}").await;
            assert!(reply.text.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"#)), "{id}: {}", reply.text);
        }
        let reply = app.client().call_as(id, "echo", "{}").await;
        assert!(reply.text.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"#)), "{id}: {}", reply.text);
    }
    for id in ["null", "1.5", "{}", "[]", "true"] {
        let reply = app.client().rpc(id, "ping", "{}").await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32600)), "{id}");
        assert!(reply.json().get("id").is_none());
    }
}

#[tokio::test]
async fn malformed_bodies_are_json_rpc_errors() {
    let server = TestServer::start(&[]).await;
    let app = echo_app(&server).await;
    for (body, code) in [
        ("", -32700),
        ("{", -32700),
        ("{'a':1}", -32700),
        ("\u{feff}{}", -32700),
        ("1", -32600),
        ("\"x\"", -32600),
        (r#"{"jsonrpc":"2.0","id":1}"#, -32600),
        (r#"{"id":1,"method":"ping"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":7}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"ping"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[1]}"#, -32602),
    ] {
        let reply = app.client().post(body).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(code)), "{body}");
    }
    let reply = send(
        app.client().request("").body(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"x\":\"\xff\"}".to_vec()),
    )
    .await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32700)));
    for (params, code) in [
        ("{}", -32602),
        (r#"{"name":7}"#, -32602),
        (r#"{"name":"nope"}"#, -32602),
        (r#"{"name":"echo","arguments":[]}"#, -32602),
        (r#"{"name":"echo","arguments":"x"}"#, -32602),
    ] {
        let reply = app.client().rpc("1", "tools/call", params).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (200, &json!(code)), "{params}");
    }
    let reply = app.client().rpc("1", "tools/call", r#"{"name":"echo","arguments":{"n":1e400}}"#).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32600)));
    assert!(!app.client().rpc("1", "tools/call", r#"{"name":"echo","arguments":null}"#).await.is_tool_error());
    let reply = app.client().rpc("1", "tools/list", r#"{"cursor":"x"}"#).await;
    assert_eq!(reply.json()["error"]["code"], -32602);
    let text = send(app.client().request("{}").header("content-type", "text/plain")).await;
    assert!(matches!(text.status, 400 | 415), "{}", text.status);
}

#[tokio::test]
async fn notifications_and_responses_are_accepted_without_an_answer() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    for body in [
        r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":99}}"#,
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"echo"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
    ] {
        let reply = app.client().post(body).await;
        assert_eq!((reply.status, reply.text.as_str()), (202, ""), "{body}");
    }
}

#[tokio::test]
async fn batches_are_for_2025_03_26_alone() {
    let server = TestServer::start(&[("MAX_BATCH", "3")]).await;
    let app = echo_app(&server).await;
    let ping = |id: u8| format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
    let note = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    let call = r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo","arguments":{"a":1}}}"#;
    let list = r#"{"jsonrpc":"2.0","id":3,"method":"tools/list"}"#;
    let lists = app.client().post(format!("[{list},{list}]")).await.json();
    assert_eq!(lists[1]["result"]["tools"].as_array().map(Vec::len), Some(2));
    let batch = format!("[{},{note}, {call}]", ping(1));
    for client in [app.client(), app.client().header("MCP-Protocol-Version", "2025-03-26")] {
        let reply = client.post(batch.clone()).await;
        assert_eq!(reply.status, 200);
        let answers = reply.json();
        assert_eq!((&answers[0]["id"], &answers[1]["result"]["structuredContent"]), (&json!(1), &json!({ "a": 1 })));
        assert_eq!(answers.as_array().unwrap().len(), 2);
    }
    assert_eq!(app.client().post(format!("[{note}]")).await.status, 202);
    let faulty = app.client().post(format!("[1,{}]", ping(1))).await.json();
    assert_eq!((&faulty[0]["error"]["code"], &faulty[1]["id"]), (&json!(-32600), &json!(1)));
    for bad in ["[]".to_owned(), "[1".to_owned(), format!("[{0},{0},{0},{0}]", ping(1))] {
        assert_eq!(app.client().post(bad).await.status, 400);
    }
    // At once, and within the limit of one answer.
    let large = format!(
        r#"{{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{{"name":"echo","arguments":{{"x":"{}"}}}}}}"#,
        "x".repeat(400_000)
    );
    let limited = TestServer::start(&[("MAX_RESULT_BYTES", "1000000")]).await;
    let answers = echo_app(&limited).await.client().post(format!("[{large},{large}]")).await.json();
    assert!(answers[0].get("result").is_some());
    assert_eq!((&answers[1]["id"], &answers[1]["error"]["code"]), (&json!(4), &json!(413)));
    let later = app.client().header("MCP-Protocol-Version", "2025-06-18").post(batch).await;
    assert_eq!((later.status, &later.json()["error"]["code"]), (400, &json!(-32600)));
}

#[tokio::test]
async fn other_methods_are_not_allowed_and_leave_the_session_alone() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    for method in ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD"] {
        for url in [app.mcp_url.clone(), format!("{}/v1/mcp", server.base), format!("{}/v1/mcp/", server.base)] {
            let request = http().request(method.parse().unwrap(), &url).header("MCP-Session-Id", &app.id);
            let reply = send(request.header("accept", "text/event-stream")).await;
            assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")), "{method} {url}");
        }
    }
    assert_eq!(app.client().rpc("1", "tools/list", "{}").await.status, 200);
}

#[tokio::test]
async fn schemas_are_listed_unchanged() {
    let server = TestServer::start(&[]).await;
    let schema = r##"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object", "z":1,"properties":{"b":{"$ref":"#/definitions/d"},"a":{"anyOf":[{"maximum":1234567890123456789},{"const":1E2}]}},"definitions":{"d":{"type":"string"}},"x-vendor":{"k":null}}"##;
    let body = format!(
        r#"{{"device_id":"d","tools":[{{"name":"t","description":"\u00e9","title":"T","input_schema":{schema},"output_schema":{{"type":"object"}},"annotations":{{"readOnlyHint":true}},"icons":[{{"src":"data:,x"}}],"_meta":{{"k":1.0}}}}]}}"#
    );
    let request = http().post(format!("{}/v1/chat/sessions", server.base)).header("content-type", "application/json");
    let mcp_url = send(request.body(body)).await.json()["mcp_url"].as_str().unwrap().to_owned();
    let list = McpClient::new(&mcp_url).rpc("1", "tools/list", "{}").await.text;
    let tool = format!(
        r#"{{"name":"t","title":"T","description":"\u00e9","inputSchema":{schema},"outputSchema":{{"type":"object"}},"annotations":{{"readOnlyHint":true}},"icons":[{{"src":"data:,x"}}],"_meta":{{"k":1.0}}}}"#
    );
    assert_eq!(list, format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"tools":[{tool}]}}}}"#));
}

#[tokio::test]
async fn an_output_schema_is_kept_or_the_result_says_so() {
    let server = TestServer::start(&[]).await;
    let app = App::register_with(
        &server,
        json!({ "device_id": "d", "tools": [
            { "name": "object", "output_schema": { "type": "object" } },
            { "name": "any", "output_schema": { "type": "array" } },
        ] }),
    )
    .await;
    let mut bridge = app.connect().await;
    let legacy = app.client().rpc("1", "tools/list", "{}").await.json();
    assert!(legacy["result"]["tools"][1].get("outputSchema").is_none());
    let modern = app.client().modern("tools/list", json!({})).await.json();
    assert_eq!(modern["result"]["tools"][1]["outputSchema"], json!({ "type": "array" }));
    let call = app.client().spawn_call("1", "object", "{}");
    bridge.answer_next(r#""ok":true,"content":"just text""#).await;
    assert!(call.await.unwrap().tool_text().contains("output_schema"));
    let call = app.client().spawn_call("1", "any", "{}");
    bridge.answer_next(r#""result":{"content":[],"structuredContent":[1]}"#).await;
    let legacy = call.await.unwrap().json()["result"].clone();
    assert!(legacy.get("structuredContent").is_none() && legacy["content"][0]["text"] == "[\n  1\n]", "{legacy}");
    let client = app.client();
    let call = tokio::spawn(async move { client.modern("tools/call", json!({ "name": "any" })).await });
    bridge.answer_next(r#""ok":true,"content":[1]"#).await;
    assert_eq!(call.await.unwrap().json()["result"]["structuredContent"], json!([1]));
}

#[tokio::test]
async fn equal_ids_at_once_get_their_own_answers() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let first = app.client().spawn_call("0", "echo", r#"{"n":1}"#);
    let second = app.client().spawn_call("0", "echo", r#"{"n":2}"#);
    let mut calls = [bridge.invoked().await, bridge.invoked().await];
    calls.sort_by_key(|(_, _, arguments)| arguments["n"].as_u64());
    // The later one is answered first.
    for (request_id, _, arguments) in calls.iter().rev() {
        bridge.answer(request_id, &format!(r#""ok":true,"content":{arguments}"#)).await;
    }
    assert_eq!(first.await.unwrap().json()["result"]["structuredContent"], json!({ "n": 1 }));
    assert_eq!(second.await.unwrap().json()["result"]["structuredContent"], json!({ "n": 2 }));
}

#[tokio::test]
async fn two_hundred_calls_with_one_id_over_two_sessions_do_not_cross() {
    let server = TestServer::start(&[]).await;
    let apps = [echo_app(&server).await, echo_app(&server).await];
    let calls = (0..200).map(|n| {
        let client = apps[n % 2].client();
        async move { (n, client.call_as("1", "echo", &format!(r#"{{"n":{n}}}"#)).await) }
    });
    for (n, reply) in join_all(calls).await {
        assert_eq!(reply.json()["result"]["structuredContent"], json!({ "n": n }), "{}", reply.text);
    }
}

#[tokio::test]
async fn cancelling_ends_the_call_that_is_meant() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let cancel = async |id: &str| {
        let body = format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        assert_eq!(client.post(body).await.status, 202);
    };
    // By value, not by text.
    let call = client.spawn_call("1", "slow", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    cancel("\"1\"").await;
    cancel("1.0").await;
    let reply = call.await.unwrap();
    assert!(reply.is_tool_error() && reply.tool_text() == "Tool call was cancelled.");
    let frame = bridge.recv().await;
    assert_eq!(
        (&frame["type"], &frame["request_id"], &frame["reason"]),
        (&json!("cancel_tool"), &json!(request_id), &json!("cancelled"))
    );
    // Two calls with one id: neither is meant.
    let calls = [client.spawn_call("2", "slow", "{}"), client.spawn_call("2", "slow", "{}")];
    let invoked = [bridge.invoked().await, bridge.invoked().await];
    cancel("2").await;
    for (request_id, _, _) in &invoked {
        bridge.answer(request_id, r#""ok":true,"content":"done""#).await;
    }
    for call in calls {
        assert_eq!(call.await.unwrap().tool_text(), "done");
    }
    // Late: the next call with that id is not hit. ("1" was cancelled above without such a call.)
    cancel("2").await;
    let call = client.spawn_call("2", "slow", "{}");
    bridge.answer_next(r#""ok":true,"content":"again""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "again");
    // Early: the call that follows is cancelled before it is sent.
    cancel("3").await;
    assert_eq!(client.call_as("3", "slow", "{}").await.tool_text(), "Tool call was cancelled.");
    let call = client.spawn_call("3", "slow", "{}");
    bridge.answer_next(r#""ok":true,"content":"third""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "third");
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_call() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    for modern in [false, true] {
        let client = app.client();
        let call = tokio::spawn(async move {
            if modern {
                client.modern("tools/call", json!({ "name": "slow" })).await
            } else {
                client.call("slow", "{}").await
            }
        });
        let (request_id, _, _) = bridge.invoked().await;
        call.abort();
        let frame = bridge.recv().await;
        assert_eq!((&frame["type"], &frame["request_id"]), (&json!("cancel_tool"), &json!(request_id)));
        assert_eq!(frame["reason"], "client_disconnected");
        until(async || app.status().await.json()["calls_in_flight"] == 0).await;
    }
}

#[tokio::test]
async fn a_setting_limits_that_to_modern_clients() {
    let server = TestServer::start(&[("CANCEL_ON_DISCONNECT", "modern")]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    call.abort();
    until(async || app.status().await.json()["calls_in_flight"] == 0).await;
    let client = app.client();
    let call = tokio::spawn(async move { client.modern("tools/call", json!({ "name": "slow" })).await });
    let (request_id, _, _) = bridge.invoked().await;
    call.abort();
    // The first frame after it belongs to the modern call: the legacy one sent none.
    assert_eq!(bridge.recv().await["request_id"], request_id.as_str());
}

#[tokio::test]
async fn a_timed_out_call_says_so_and_tells_the_app() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.3")]).await;
    let registration =
        json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel", "deadline"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    let frame = bridge.recv().await;
    assert!((1..=300).contains(&frame["timeout_ms"].as_u64().unwrap()));
    let (reply, took) = timed(call).await;
    assert_eq!(reply.unwrap().tool_text(), "Tool call timed out after 0.3 s.");
    assert!(took < Duration::from_secs(2));
    let cancel = bridge.recv().await;
    assert_eq!((&cancel["type"], &cancel["reason"]), (&json!("cancel_tool"), &json!("timeout")));
}

#[tokio::test]
async fn long_calls_stream_if_the_client_takes_it() {
    let server = TestServer::start(&[("STREAM_AFTER_SECONDS", "0.2"), ("KEEP_ALIVE_SECONDS", "0.1")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    // Fast calls stay JSON.
    let call = app.client().spawn_call("1", "slow", "{}");
    bridge.answer_next(r#""ok":true,"content":"fast""#).await;
    assert_eq!(call.await.unwrap().header("content-type"), Some("application/json"));
    // Slow ones become a stream, kept alive by comments and ended by the result.
    let call = app.client().spawn_call("1", "slow", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    bridge.answer(&request_id, "\"ok\":true,\"content\":{\n\"a\":\r\n1}").await;
    let reply = call.await.unwrap();
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert_eq!((reply.header("x-accel-buffering"), reply.header("cache-control")), (Some("no"), Some("no-cache")));
    assert!(reply.text.matches(":\n\n").count() >= 3, "{}", reply.text);
    let event = reply.text.split("\n\n").find(|event| event.starts_with("event: message")).unwrap();
    let data: Vec<_> = event.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let result: Value = serde_json::from_str(&data.join("\n")).unwrap();
    assert_eq!((&result["id"], &result["result"]["structuredContent"]), (&json!(1), &json!({ "a": 1 })));
    assert!(reply.text.ends_with("\n\n"));
    // A client that takes only JSON waits.
    let request = app.client().request(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#);
    let call = tokio::spawn(send(request.header("accept", "application/json")));
    let (request_id, _, _) = bridge.invoked().await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    bridge.answer(&request_id, r#""ok":true,"content":"late""#).await;
    let reply = call.await.unwrap();
    // Two Accept lines were sent, so a stream was allowed; both forms carry the result.
    assert!(reply.text.contains("late"));
}

#[tokio::test]
async fn a_stream_ends_with_a_result_whatever_happens() {
    let settings = [("STREAM_AFTER_SECONDS", "0.1"), ("KEEP_ALIVE_SECONDS", "0.1"), ("TOOL_TIMEOUT_SECONDS", "0.6")];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    let reply = call.await.unwrap();
    assert!(reply.text.starts_with(":\n\n") && reply.text.contains("timed out"), "{}", reply.text);
    let mut response = app
        .client()
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#)
        .send()
        .await
        .unwrap();
    bridge.invoked().await;
    assert_eq!(soon(response.chunk()).await.unwrap().unwrap(), ":\n\n");
    drop(bridge);
    let mut rest = String::new();
    while let Some(chunk) = soon(response.chunk()).await.unwrap() {
        rest.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(rest.contains("Bridge disconnected before the tool answered."), "{rest}");
}

#[tokio::test]
async fn a_batch_takes_no_longer_than_its_slowest_call() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.5")]).await;
    let app = App::register(&server).await;
    let _bridge = app.connect().await;
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#;
    let (reply, took) = timed(app.client().post(format!("[{call},{call},{call},{call}]"))).await;
    assert_eq!(reply.text.matches("timed out").count(), 4);
    assert!(took < Duration::from_millis(1500), "{took:?}");
}

#[tokio::test]
async fn progress_is_told_in_order_to_those_who_asked() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["progress"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    // A token alone does not make a stream; a report does.
    let call = |token: &str| {
        let params = format!(r#"{{"name":"slow","_meta":{{"progressToken":{token}}}}}"#);
        let client = app.client();
        tokio::spawn(async move { client.rpc("9", "tools/call", &params).await })
    };
    let quiet = call("1");
    bridge.answer_next(r#""ok":true,"content":"x""#).await;
    assert_eq!(quiet.await.unwrap().header("content-type"), Some("application/json"));
    let told = call("\"t\\u0041\"");
    let frame = bridge.recv().await;
    assert_eq!(frame["progress"], true);
    let request_id = frame["request_id"].as_str().unwrap().to_owned();
    let report = |progress: &str| {
        format!(
            r#"{{"type":"tool_progress","request_id":"{request_id}","progress":{progress},"total":1E1,"message":"m"}}"#
        )
    };
    for progress in ["1", "1", "0.5", "2.50", "2.5"] {
        bridge.send_text(report(progress)).await;
    }
    bridge.answer(&request_id, r#""ok":true,"content":"end""#).await;
    bridge.send_text(report("9")).await;
    let reply = told.await.unwrap();
    let events: Vec<_> =
        reply.text.split("\n\n").filter_map(|event| event.strip_prefix("event: message\ndata: ")).collect();
    let note = |progress| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":"t\u0041","progress":{progress},"total":1E1,"message":"m"}}}}"#
        )
    };
    assert_eq!(events.len(), 3, "{}", reply.text);
    assert_eq!(events[..2], [note("1"), note("2.50")]);
    assert!(events[2].contains("end"));
    // As long as an id may be, for it is repeated as often.
    let token = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
    let refused = call(&token(1025)).await.unwrap();
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (200, &json!(-32602)));
    assert!(refused.text.contains("1025 bytes long; the limit is 1024"), "{}", refused.text);
    let longest = call(&token(1024));
    bridge.answer_next(r#""ok":true,"content":"x""#).await;
    assert_eq!(longest.await.unwrap().tool_text(), "x");
    // Without a token the app is not asked for it.
    let call = app.client().spawn_call("1", "slow", "{}");
    assert!(bridge.recv().await.get("progress").is_none());
    drop(bridge);
    call.await.unwrap();
}

#[tokio::test]
async fn apps_that_ask_for_context_get_it() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["context"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let params = json!({ "name": "echo", "inputResponses": { "k": { "n": 1 } }, "requestState": "s" });
    let call = tokio::spawn(async move {
        send(client.modern_request("1", "tools/call", params, json!({ "traceparent": "00-1", "progressToken": 1 })))
            .await
    });
    let frame = bridge.recv().await;
    assert_eq!(frame["client"], json!({ "name": "test", "version": "1", "protocol_version": "2026-07-28" }));
    assert_eq!(frame["meta"], json!({ "traceparent": "00-1" }));
    assert_eq!(frame["client_capabilities"], json!({}));
    assert_eq!(frame["input_responses"], json!({ "k": { "n": 1 } }));
    assert_eq!(frame["request_state"], "s");
    // A modern client is asked for input with the app's own words.
    let asked = r#"{"resultType":"input_required","inputRequests":{"q":{"method":"roots/list"}},"requestState":"t"}"#;
    bridge.answer(frame["request_id"].as_str().unwrap(), &format!(r#""result":{asked}"#)).await;
    let result = call.await.unwrap().json()["result"].clone();
    assert_eq!((&result["resultType"], &result["requestState"]), (&json!("input_required"), &json!("t")));
    assert_eq!(result["inputRequests"], json!({ "q": { "method": "roots/list" } }));
    assert!(result.get("content").is_none());
}

#[tokio::test]
async fn an_apps_modern_errors_have_their_http_status() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    // -32020 would make a client send the call again.
    for (code, modern_status) in [(-32021, 400), (-32601, 404), (-32602, 200), (7, 200), (-32020, 200)] {
        let client = app.client();
        let call = tokio::spawn(async move { client.modern("tools/call", json!({ "name": "echo" })).await });
        bridge.answer_next(&format!(r#""ok":false,"error":{{"code":{code},"message":"m"}}"#)).await;
        let reply = call.await.unwrap();
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (modern_status, &json!(code)));
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(&format!(r#""ok":false,"error":{{"code":{code},"message":"m"}}"#)).await;
        assert_eq!(call.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn web_pages_get_in_only_by_invitation() {
    let settings = [("ALLOWED_ORIGINS", "https://app.example"), ("APP_TOKEN", "a"), ("OPENCLAW_TOKEN", "b")];
    let server = TestServer::start(&settings).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "a").await;
    let client = app.client().header("authorization", "Bearer b");
    let reply = client.clone().header("origin", "https://app.example").rpc("1", "tools/list", "{}").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some("https://app.example")));
    assert_eq!(reply.header("vary"), Some("Origin"));
    for bad in ["https://evil.example", "null"] {
        let reply = client.clone().header("origin", bad).rpc("1", "tools/list", "{}").await;
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (403, None), "{bad}");
        let reply = send(
            http()
                .post(format!("{}/v1/chat/sessions", server.base))
                .bearer_auth("a")
                .header("origin", bad)
                .json(&json!({ "device_id": "d" })),
        )
        .await;
        assert_eq!(reply.status, 403);
    }
    assert_eq!(client.rpc("1", "tools/list", "{}").await.header("access-control-allow-origin"), None);
    let preflight = http()
        .request(reqwest::Method::OPTIONS, &app.mcp_url)
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,mcp-param-region");
    let reply = send(preflight).await;
    assert_eq!((reply.status, reply.header("access-control-allow-methods")), (204, Some("POST")));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,mcp-param-region"));
    // A browser's own mark on a request is no reason to refuse it: Node sends it too.
    let reply =
        app.client().header("authorization", "Bearer b").header("sec-fetch-mode", "cors").rpc("1", "ping", "{}").await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn doubled_headers_and_foreign_hosts_are_refused() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let status = async |headers: &str| {
        let path = app.mcp_url.split_once("/v1").unwrap().1;
        let request = format!(
            "POST /v1{path} HTTP/1.1\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n{body}",
            body.len()
        );
        let answer = server.raw(request.as_bytes(), Duration::from_secs(5)).await;
        answer.split(' ').nth(1).unwrap_or("none").to_owned()
    };
    let json = "Content-Type: application/json\r\n";
    assert_eq!(status(&format!("Host: localhost\r\n{json}")).await, "200");
    for (headers, expected) in [
        (json.to_owned(), "400"),
        (format!("Host: localhost\r\nHost: localhost\r\n{json}"), "400"),
        (format!("Host: localhost\r\n{json}{json}"), "400"),
        (format!("Host: localhost\r\n{json}Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), "400"),
        (format!("Host: localhost\r\n{json}Origin: http://localhost\r\nOrigin: http://localhost\r\n"), "400"),
        (format!("Host: evil.example\r\n{json}"), "403"),
    ] {
        assert_eq!(status(&headers).await, expected, "{headers}");
    }
}

#[tokio::test]
async fn the_stream_of_a_dropped_client_frees_its_call() {
    let server = TestServer::start(&[("STREAM_AFTER_SECONDS", "0.05"), ("KEEP_ALIVE_SECONDS", "0.05")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let response = app
        .client()
        .request(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#)
        .send()
        .await
        .unwrap();
    bridge.invoked().await;
    let mut stream = response.bytes_stream();
    soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(app.status().await.json()["calls_in_flight"], 1);
    drop(stream);
    until(async || app.status().await.json()["calls_in_flight"] == 0).await;
}

#[tokio::test]
async fn the_app_hears_within_a_tenth_of_a_second_that_a_call_is_not_wanted() {
    const ROUNDS: usize = 9;
    let server = TestServer::start(&[]).await;
    let hasty = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.2")]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    for reason in ["cancelled", "client_disconnected", "timeout", "session_deleted", "shutdown"] {
        let mut delays = Vec::new();
        for _ in 0..ROUNDS {
            let stopping = TestServer::start(&[("DRAIN_SECONDS", "0.1")]).await;
            let server = match reason {
                "timeout" => &hasty,
                "shutdown" => &stopping,
                _ => &server,
            };
            let app = App::register_with(server, registration.clone()).await;
            let mut bridge = app.connect().await;
            let sent = Instant::now();
            let call = app.client().spawn_call("1", "slow", "{}");
            let (request_id, _, _) = bridge.invoked().await;
            let now = Instant::now();
            let (cause, acting) = match reason {
                "cancelled" => {
                    let client = app.client();
                    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
                    (now, Some(tokio::spawn(async move { client.post(cancel).await })))
                }
                "session_deleted" => {
                    let app = app.clone();
                    (now, Some(tokio::spawn(async move { app.delete().await })))
                }
                "client_disconnected" => {
                    call.abort();
                    (now, None)
                }
                "timeout" => (sent + Duration::from_millis(200), None),
                _ => {
                    server.begin_stop();
                    (now + Duration::from_millis(100), None)
                }
            };
            let frame = bridge.recv().await;
            delays.push(cause.elapsed());
            let said = if reason == "shutdown" { "cancelled" } else { reason };
            let expected =
                json!({ "type": "cancel_tool", "mcpSessionId": app.id, "request_id": request_id, "reason": said });
            assert_eq!(frame, expected);
            match reason {
                "session_deleted" => assert_eq!(bridge.closed().await.0, 1000),
                "shutdown" => assert_eq!(bridge.closed().await.0, 1012),
                _ => {}
            }
            if let Some(acting) = acting {
                acting.await.unwrap();
            }
        }
        delays.sort();
        let median = delays[ROUNDS / 2];
        eprintln!("{reason}: {median:?} in the median, {:?} at worst", delays[ROUNDS - 1]);
        assert!(median < Duration::from_millis(100), "{reason}: {delays:?}");
    }
}
