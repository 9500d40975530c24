//! What a deployment must do, whatever stands in front.

use std::time::Duration;

use futures_util::StreamExt;
use openclaw_mcp_proxy::proxy::config::Config;
use reqwest::RequestBuilder;
use reqwest::header::{ACCEPT, HeaderValue};
use serde_json::json;

use super::{Front, Kind};
use crate::support::{App, McpClient, http, send, soon};

fn client(app: &App) -> McpClient {
    app.client().header("authorization", "Bearer claw-token")
}

/// A request of a client that takes no event stream.
fn without_stream(request: RequestBuilder) -> RequestBuilder {
    request.headers([(ACCEPT, HeaderValue::from_static("application/json"))].into_iter().collect())
}

const SETTINGS: [(&str, &str); 3] =
    [("STREAM_AFTER_SECONDS", "0.2"), ("KEEP_ALIVE_SECONDS", "0.2"), ("MAX_DENIALS_PER_SECOND_PER_ADDRESS", "10")];

/// What a deployment must do, whatever stands in front.
async fn serves_whatever_it_must(front: &Front) {
    let schema =
        json!({ "type": "object", "properties": { "user_id": { "type": "string", "x-mcp-header": "user_id" } } });
    let registration = json!({
        "device_id": "d",
        "tools": [{ "name": "echo" }, { "name": "slow" }, { "name": "whose", "input_schema": schema }],
        "bridge_features": ["cancel", "progress"],
    });

    // The URLs are those by which the front is reached, whatever a stranger says of them.
    let honest = [
        format!("wss://127.0.0.1:{}/v1/chat/sessions/", front.port),
        format!("https://127.0.0.1:{}/v1/mcp/", front.port),
    ];
    for spoofed in [
        &[][..],
        &[("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "http")],
        &[("x-forwarded-host", "evil.example"), ("x-forwarded-host", "worse.example"), ("x-forwarded-proto", "ftp")],
        &[("forwarded", "for=6.6.6.6;host=evil.example;proto=http"), ("x-forwarded-for", "6.6.6.6")],
        &[("x-forwarded-port", "1"), ("x-forwarded-prefix", "/evil"), ("x-real-ip", "6.6.6.6")],
    ] {
        let mut request = http().post(format!("{}/v1/chat/sessions", front.base)).bearer_auth("app-token");
        for (name, value) in spoofed {
            request = request.header(*name, *value);
        }
        let reply = send(request.json(&registration)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let urls = ["bridge_url", "mcp_url"].map(|url| reply.json()[url].as_str().unwrap().to_owned());
        assert!(urls.iter().zip(&honest).all(|(url, honest)| url.starts_with(honest)), "{spoofed:?}: {urls:?}");
    }

    // The upgrade works; so do the tokens, the session's header, and what clients of 2026-07-28 repeat in headers.
    let app = front.register(registration).await;
    let mut bridge = app.connect().await;
    assert_eq!(app.client().call("echo", "{}").await.status, 401);
    let bare = McpClient::new(&format!("{}/v1/mcp", front.base)).header("authorization", "Bearer claw-token");
    let by_header = bare.header("mcp-session-id", &app.id);
    let call = by_header.spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":"by header""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "by header");
    let params = json!({ "name": "whose", "arguments": { "user_id": "u" } });
    let request = client(&app).modern_request("1", "tools/call", params.clone(), json!({}));
    let call = tokio::spawn(send(request.header("mcp-param-user_id", "u")));
    bridge.answer_next(r#""ok":true,"content":"modern""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "modern");
    let silent = send(client(&app).modern_request("1", "tools/call", params, json!({}))).await;
    assert_eq!(silent.status, 400, "that header must have been there: {}", silent.text);

    // As much as the proxy takes, and as much comes back. It is the proxy that says what is too much.
    let body = |size: usize| {
        let head = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"x":""#;
        let tail = r#""}}}"#;
        format!("{head}{}{tail}", "x".repeat(size - head.len() - tail.len()))
    };
    let limit = Config::default().max_body_bytes;
    let call = tokio::spawn(send(without_stream(client(&app).request(body(limit)))));
    let (id, _, arguments) = bridge.invoked().await;
    assert!(arguments["x"].as_str().unwrap().len() > limit - 1000);
    let large = "y".repeat(limit);
    bridge.answer(&id, &format!(r#""ok":true,"content":"{large}""#)).await;
    assert!(call.await.unwrap().tool_text() == large);
    let refused = client(&app).post(body(limit + 1)).await;
    assert!(refused.status == 413 && refused.text.contains("4194304"), "{}: {}", refused.status, refused.text);

    // An event arrives while the call still runs.
    let request =
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","_meta":{"progressToken":1}}}"#;
    let response = tokio::spawn(client(&app).request(request).send());
    let (id, _, _) = bridge.invoked().await;
    let progress = json!({ "type": "tool_progress", "mcpSessionId": app.id, "request_id": id, "progress": 1 });
    bridge.send(progress).await;
    let mut events = soon(response).await.unwrap().unwrap().bytes_stream();
    let mut seen = String::new();
    while !seen.contains("notifications/progress") {
        seen.push_str(std::str::from_utf8(&soon(events.next()).await.unwrap().unwrap()).unwrap());
    }
    // So do the comments that keep the way open.
    let comments = seen.matches(":\n\n").count();
    while seen.matches(":\n\n").count() < comments + 2 {
        seen.push_str(std::str::from_utf8(&soon(events.next()).await.unwrap().unwrap()).unwrap());
    }
    assert_eq!(app.status().await.json()["calls_in_flight"], 1);
    bridge.answer(&id, r#""ok":true,"content":"the end""#).await;
    while let Some(piece) = soon(events.next()).await {
        seen.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }
    assert!(seen.contains("the end"), "{seen}");

    // A client that goes is told to the app, before and after the answer has begun.
    for streams in [false, true] {
        // One that takes no stream is written nothing while it waits, by which a front could notice.
        let accept = if streams { "text/event-stream" } else { "application/json" };
        let call = http().post(&app.mcp_url).bearer_auth("claw-token").header("accept", accept);
        let call = call.header("content-type", "application/json").body(request);
        let call = tokio::spawn(async move { call.send().await.unwrap().bytes_stream().collect::<Vec<_>>().await });
        let (id, _, _) = bridge.invoked().await;
        if streams {
            // The answer's head is out once the comments come.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        call.abort();
        let frame = bridge.recv().await;
        assert_eq!((&frame["type"], &frame["request_id"]), (&json!("cancel_tool"), &json!(id)));
        assert_eq!(frame["reason"], "client_disconnected");
    }

    // Nobody passes for many by an address of his own invention.
    let guess = async |number: usize| {
        let stranger = format!("6.6.{number}.6");
        let request = http().post(&app.mcp_url).bearer_auth("wrong").header("x-forwarded-for", &stranger);
        let request = request.header("x-real-ip", &stranger).header("forwarded", format!("for={stranger}"));
        send(request.json(&json!({}))).await.status
    };
    let mut answers = Vec::new();
    while answers.len() < 100 && !answers.contains(&429) {
        answers.push(guess(answers.len()).await);
    }
    assert!(answers.starts_with(&[401]) && answers.ends_with(&[429]), "{answers:?}");
}

#[tokio::test]
async fn nginx_serves_whatever_it_must() {
    serves_whatever_it_must(&Front::start(Kind::Nginx, &SETTINGS).await).await;
}

#[tokio::test]
async fn haproxy_serves_whatever_it_must() {
    serves_whatever_it_must(&Front::start(Kind::Haproxy, &SETTINGS).await).await;
}

#[tokio::test]
async fn caddy_serves_whatever_it_must() {
    serves_whatever_it_must(&Front::start(Kind::Caddy, &SETTINGS).await).await;
}

#[tokio::test]
async fn traefik_serves_whatever_it_must() {
    serves_whatever_it_must(&Front::start(Kind::Traefik, &SETTINGS).await).await;
}

#[tokio::test]
async fn nginx_haproxy_and_caddy_reach_the_proxy_over_a_unix_socket() {
    for kind in [Kind::Nginx, Kind::Haproxy, Kind::Caddy] {
        serves_whatever_it_must(&Front::start_over_unix(kind, &SETTINGS).await).await;
    }
}

/// The pings are what keeps a bridge open in a front that cuts what is idle.
async fn pings_keep_a_bridge_open(kind: Kind, changes: &[(&str, &str)]) {
    for (ping, stays) in [("0.5", true), ("20", false)] {
        let front = Front::start_with(kind, &[("PING_SECONDS", ping)], changes).await;
        let app = front.register(json!({ "device_id": "d", "tools": [{ "name": "echo" }] })).await;
        let mut bridge = app.connect().await;
        let alive = tokio::time::timeout(Duration::from_secs(6), async {
            while let Some(Ok(frame)) = bridge.socket.next().await {
                assert!(!frame.is_binary());
            }
        });
        assert_eq!(alive.await.is_err(), stays, "{kind:?}, a ping each {ping} s");
        // The front closes its two sides one after the other.
        app.wait_connected(stays).await;
    }
}

#[tokio::test]
async fn pings_keep_a_bridge_open_in_nginx() {
    pings_keep_a_bridge_open(Kind::Nginx, &[("proxy_read_timeout 150s;", "proxy_read_timeout 2s;")]).await;
}

#[tokio::test]
async fn pings_keep_a_bridge_open_in_haproxy() {
    let changes = [
        ("timeout client 150s", "timeout client 2s"),
        ("timeout server 150s", "timeout server 2s"),
        ("    timeout tunnel 1h\n", ""),
    ];
    pings_keep_a_bridge_open(Kind::Haproxy, &changes).await;
}

/// Longer than the 60 s for which reverse proxies wait unless told otherwise.
const LONG: Duration = Duration::from_secs(75);

/// A call that says nothing for as long as that arrives, and a bridge that carries nothing but pings is still open.
async fn waits_for_a_long_call(kind: Kind) {
    // No event stream helps this client, and no comments of one.
    let front = Front::start(kind, &[]).await;
    let registration = json!({ "device_id": "d", "tools": [{ "name": "slow" }] });
    let (busy, idle) = (front.register(registration.clone()).await, front.register(registration).await);
    let (mut bridge, mut idle_bridge) = (busy.connect().await, idle.connect().await);
    let request = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow"}}"#;
    let call = without_stream(client(&busy).request(request));
    let answer = tokio::spawn(async move { call.send().await.unwrap().text().await.unwrap() });
    let (id, _, _) = bridge.invoked().await;
    let mut pings = 0;
    let quiet = tokio::time::timeout(LONG, async {
        loop {
            tokio::select! {
                frame = bridge.socket.next() => assert!(!frame.unwrap().unwrap().is_close()),
                frame = idle_bridge.socket.next() => pings += usize::from(frame.unwrap().unwrap().is_text()),
            }
        }
    });
    assert!(quiet.await.is_err() && pings >= 3, "{kind:?}");
    bridge.answer(&id, r#""ok":true,"content":"at last""#).await;
    assert!(soon(answer).await.unwrap().contains("at last"), "{kind:?}");
    let call = client(&idle).spawn_call("1", "slow", "{}");
    idle_bridge.answer_next(r#""ok":true,"content":"still there""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "still there", "{kind:?}");
}

#[tokio::test]
#[ignore = "it takes 80 s; tests/run --heavy runs it"]
async fn every_front_waits_for_a_long_call_and_keeps_a_quiet_bridge() {
    let kinds = [Kind::Nginx, Kind::Haproxy, Kind::Caddy, Kind::Traefik];
    futures_util::future::join_all(kinds.map(waits_for_a_long_call)).await;
}
