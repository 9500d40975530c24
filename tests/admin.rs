//! The operator's listener: numbers, pages, and who may see them.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{App, Reply, TestServer, http, send, soon, tools, until};

const ON: [(&str, &str); 1] = [("ADMIN_LISTEN", "127.0.0.1:0")];

async fn server(settings: &[(&str, &str)]) -> TestServer {
    TestServer::start(&[&ON[..], settings].concat()).await
}

async fn get(server: &TestServer, path: &str) -> Reply {
    send(http().get(format!("{}{path}", server.admin.as_ref().unwrap()))).await
}

/// The samples of `/metrics`, by name and labels.
async fn metrics(server: &TestServer) -> BTreeMap<String, f64> {
    let reply = get(server, "/metrics").await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("text/plain; version=0.0.4; charset=utf-8")));
    let samples = reply.text.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.trim_start_matches("openclaw_proxy_").to_owned(), value.parse().expect(line))
        })
        .collect()
}

#[tokio::test]
async fn the_numbers_say_what_happened() {
    let settings = [("TOOL_TIMEOUT_SECONDS", "1"), ("MAX_CALLS_PER_SESSION", "2"), ("MAX_SESSIONS", "2")];
    let server = server(&settings).await;
    let before = metrics(&server).await;
    assert!(
        before
            .iter()
            .filter(|(name, _)| name.contains("_total"))
            .all(|(name, value)| *value == 0.0 || name.starts_with("process"))
    );
    let app = App::register(&server).await;
    let client = app.client();
    client.call("echo", "{}").await;
    let mut bridge = app.connect().await;
    let calls = ["1", "2"].map(|id| client.spawn_call(id, "echo", r#"{"x":1}"#));
    let ids = [bridge.invoked().await.0, bridge.invoked().await.0];
    client.call("echo", "{}").await;
    let running = metrics(&server).await;
    assert_eq!([running["calls_in_flight"], running["bridges"], running["sessions"]], [2.0, 1.0, 1.0]);
    tokio::time::sleep(Duration::from_millis(30)).await;
    bridge.answer(&ids[0], r#""ok":true,"content":1"#).await;
    bridge.answer(&ids[1], r#""ok":false,"error":"no""#).await;
    for call in calls {
        soon(call).await.unwrap();
    }
    client.call("echo", "{}").await;
    let leaving = client.spawn_call("9", "echo", "{}");
    bridge.invoked().await;
    bridge.invoked().await;
    leaving.abort();
    bridge.send_text(r#"{"type":"invoke_result","request_id":"?","ok":true}"#).await;
    bridge.send_text("{").await;
    let other = App::register(&server).await;
    let create = http().post(format!("{}/v1/chat/sessions", server.base));
    assert_eq!(send(create.json(&json!({ "device_id": "d", "tools": tools(&["a"]) }))).await.status, 503);
    other.delete().await;
    drop(bridge);
    until(async || metrics(&server).await["bridges"] == 0.0).await;
    let after = metrics(&server).await;
    for (name, value) in [
        (r#"calls_total{outcome="ok"}"#, 1.0),
        (r#"calls_total{outcome="tool_error"}"#, 1.0),
        (r#"calls_total{outcome="not_connected"}"#, 1.0),
        (r#"calls_total{outcome="busy"}"#, 1.0),
        (r#"calls_total{outcome="timeout"}"#, 1.0),
        (r#"calls_total{outcome="client_gone"}"#, 1.0),
        (r#"calls_total{outcome="lost"}"#, 0.0),
        (r#"limit_reached_total{limit="max_calls_per_session"}"#, 1.0),
        (r#"limit_reached_total{limit="max_sessions"}"#, 1.0),
        (r#"limit_reached_total{limit="max_sessions_per_tenant"}"#, 0.0),
        (r#"sessions_ended_total{reason="deleted"}"#, 1.0),
        (r#"bridges_closed_total{reason="gone"}"#, 1.0),
        ("sessions_created_total", 2.0),
        ("bridges_attached_total", 1.0),
        ("results_ignored_total", 1.0),
        ("bad_frames_total", 1.0),
        ("bridge_received_frames_total", 4.0),
        ("calls_in_flight", 0.0),
        ("calls_in_flight_limit", 10_000.0),
        ("sessions", 1.0),
        ("call_seconds_count", 2.0),
        ("call_app_seconds_count", 2.0),
        (r#"call_seconds_bucket{le="0.025"}"#, 0.0),
        (r#"call_seconds_bucket{le="+Inf"}"#, 2.0),
        (r#"call_app_seconds_bucket{le="0.025"}"#, 0.0),
        (r#"call_proxy_seconds_bucket{le="+Inf"}"#, 2.0),
    ] {
        assert_eq!(after.get(name), Some(&value), "{name}");
    }
    assert!(after["call_seconds_sum"] >= after["call_app_seconds_sum"] && after["call_app_seconds_sum"] > 0.05);
    assert!(after["process_resident_memory_bytes"] > 1e6 && after["process_start_time_seconds"] > 1.7e9);
}

#[tokio::test]
async fn a_ping_that_is_answered_is_measured_and_refusals_are_counted() {
    let settings = [("PING_SECONDS", "0.5"), ("APP_TOKEN", "app-token"), ("MAX_DENIALS_PER_SECOND_PER_ADDRESS", "1")];
    let server = server(&settings).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "app-token").await;
    app.connect().await.echo();
    until(async || metrics(&server).await["ping_seconds_count"] > 1.0).await;
    for status in [401, 429] {
        assert_eq!(send(http().post(format!("{}/v1/chat/sessions", server.base))).await.status, status);
    }
    let foreign = http().get(app.session_url()).header("origin", "https://evil.example");
    assert_eq!(send(foreign).await.status, 403);
    let after = metrics(&server).await;
    for reason in ["token", "limit", "gate"] {
        assert_eq!(after[&format!(r#"apps_refused_total{{reason="{reason}"}}"#)], 1.0, "{reason}");
    }
    assert_eq!(after[r#"limit_reached_total{limit="max_denials_per_second_per_address"}"#], 1.0);
}

#[tokio::test]
async fn nobody_sees_the_pages_without_the_token_and_probes_need_none() {
    let server = server(&[("ADMIN_TOKEN", "operators-canary")]).await;
    let base = server.admin.clone().unwrap();
    for path in ["/", "/events", "/status.json", "/metrics", "/sessions/00000000-0000-4000-8000-000000000000.json"] {
        let url = format!("{base}{path}");
        let refused = get(&server, path).await;
        assert_eq!(refused.status, 401, "{path}");
        assert!(refused.header("www-authenticate").unwrap().starts_with("Basic realm="), "{path}");
        for wrong in
            [http().get(&url).bearer_auth("operators-canarx"), http().get(&url).basic_auth("x", Some("operators"))]
        {
            assert_eq!(send(wrong).await.status, 401, "{path}");
        }
        for right in [
            http().get(&url).bearer_auth("operators-canary"),
            http().get(&url).basic_auth("anybody", Some("operators-canary")),
        ] {
            let response = soon(right.send()).await.unwrap();
            assert_eq!(response.status(), if path.starts_with("/sessions") { 404 } else { 200 }, "{path}");
        }
    }
    assert_eq!(
        (get(&server, "/ready").await.text.as_str(), get(&server, "/health").await.text.as_str()),
        ("ready", "ok")
    );
    // The public listener shows nothing of it but readiness.
    for path in ["/", "/events", "/status.json", "/metrics"] {
        let url = format!("{}{path}", server.base);
        assert_eq!(send(http().get(url).bearer_auth("operators-canary")).await.status, 404, "{path}");
    }
    assert_eq!(send(http().get(format!("{}/ready", server.base))).await.text, "ready");
}

#[tokio::test]
async fn a_page_that_rebinds_its_name_sees_nothing() {
    let server = server(&[]).await;
    let url = format!("{}/status.json", server.admin.as_ref().unwrap());
    for (host, status) in [("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost:1", 200), ("[::1]", 200)]
    {
        assert_eq!(send(http().get(&url).header("host", host)).await.status, status, "{host}");
    }
}

#[tokio::test]
async fn the_status_shows_tenants_sessions_and_calls_and_no_content() {
    let server = server(&[("RECENT_CALLS", "3")]).await;
    let registration = json!({
        "device_id": "d", "device_name": "Desk <b>", "tools": tools(&["echo", "b"]), "want_session_secret": true,
    });
    let created = send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&registration)).await.json();
    let (id, secret) = (created["mcpSessionId"].as_str().unwrap(), created["session_secret"].as_str().unwrap());
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let mut events = soon(http().get(format!("{}/events", server.admin.as_ref().unwrap())).send()).await.unwrap();
    assert_eq!(events.headers()["content-type"], "text/event-stream");
    for n in 0..5 {
        let call = app.client().spawn_call("1", "echo", r#"{"x":"canary-argument"}"#);
        bridge.answer_next(&format!(r#""ok":true,"content":"canary-result {n}""#)).await;
        soon(call).await.unwrap();
    }
    let status = get(&server, "/status.json").await;
    let shown = status.json();
    assert_eq!(
        [&shown["sessions"]["now"], &shown["bridges"], &shown["outcomes"]["ok"]],
        [&json!(2), &json!(1), &json!(5)]
    );
    let tenant = &shown["tenants"][0];
    assert_eq!([&tenant["name"], &tenant["sessions"], &tenant["bridges"]], [&json!("default"), &json!(2), &json!(1)]);
    let sessions = shown["session_list"].as_array().unwrap();
    let own = sessions.iter().find(|session| session["id"] == id).unwrap();
    assert_eq!(
        [&own["device"], &own["tools"], &own["connected_seconds"]],
        [&json!("Desk <b>"), &json!(2), &Value::Null]
    );
    let session = get(&server, &format!("/sessions/{id}.json")).await;
    let one = session.json();
    assert_eq!([&one["tool_names"], &one["has_secret"]], [&json!(["b", "echo"]), &json!(true)]);
    assert_eq!(one["mcp_url"], created["mcp_url"]);
    assert_eq!(one["asks_for_token"], false);

    // The stream tells of the calls that are still remembered, and of those that come.
    let mut stream = String::new();
    let told = |stream: &str| {
        let calls = stream.split("\n\n").filter_map(|event| event.strip_prefix("event: calls\ndata: "));
        calls.flat_map(|data| serde_json::from_str::<Vec<Value>>(data).unwrap_or_default()).collect::<Vec<_>>()
    };
    while told(&stream).len() < 3 || !stream.contains("event: status\n") {
        stream += std::str::from_utf8(&soon(events.chunk()).await.unwrap().unwrap()).unwrap();
    }
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":false,"error":"canary""#).await;
    soon(call).await.unwrap();
    while told(&stream).last().unwrap()["outcome"] != "tool_error" {
        stream += std::str::from_utf8(&soon(events.chunk()).await.unwrap().unwrap()).unwrap();
    }
    let calls = told(&stream);
    let first = &calls[0];
    assert_eq!([&first["tool"], &first["session"], &first["outcome"]], [&json!("echo"), &json!(app.id), &json!("ok")]);
    assert_eq!(first["request_bytes"], r#"{"x":"canary-argument"}"#.len());
    assert!(first["ms"].as_f64() >= first["app_ms"].as_f64() && first["at"].as_f64() > Some(1.7e9), "{first}");
    for text in [&stream, &status.text, &session.text] {
        assert!(!text.contains("canary") && !text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn the_end_can_be_watched() {
    let server = server(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    let mut events = soon(http().get(format!("{}/events", server.admin.as_ref().unwrap())).send()).await.unwrap();
    server.begin_stop();
    until(async || get(&server, "/ready").await.status == 503).await;
    assert_eq!(get(&server, "/ready").await.text, "draining");
    assert_eq!(metrics(&server).await["draining"], 1.0);
    bridge.answer(&id, r#""ok":true,"content":"done""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "done");
    // The stream ends with the process.
    soon(async { while events.chunk().await.is_ok_and(|chunk| chunk.is_some()) {} }).await;
    server.stopped().await;
}

#[tokio::test]
async fn the_operators_connections_are_bounded() {
    let server = server(&[("MAX_ADMIN_CONNECTIONS", "2")]).await;
    let base = server.admin.clone().unwrap();
    let address = base.strip_prefix("http://").unwrap();
    let connect = async || tokio::net::TcpStream::connect(address).await.unwrap();
    let held = [connect().await, connect().await];
    let refused = soon(http().get(format!("{base}/health")).send()).await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(send(http().get(format!("{}/health", server.base))).await.status, 200);
    drop(held);
    until(async || http().get(format!("{base}/health")).send().await.is_ok()).await;
    assert!(metrics(&server).await[r#"limit_reached_total{limit="max_admin_connections"}"#] >= 1.0);
}
