//! Each bound, on both of its sides. Those of a registration are tested beside the code, in `proxy/session.rs`;
//! those of a result in `bridge.rs`; that of batches in `mcp.rs`.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{App, TestServer, http, send, soon, timed, tools, until};

#[tokio::test]
async fn registrations_are_held_to_the_settings() {
    let server = TestServer::start(&[
        ("MAX_TOOLS", "2"),
        ("MAX_TOOL_BYTES", "100"),
        ("MAX_TOOLS_BYTES", "150"),
        ("MAX_JSON_DEPTH", "8"),
    ])
    .await;
    let status = async |tools: serde_json::Value| {
        let body = json!({ "device_id": "d", "tools": tools });
        send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&body)).await.status
    };
    assert_eq!(status(tools(&["a", "b"])).await, 200);
    assert_eq!(status(tools(&["a", "b", "c"])).await, 422);
    let tool = |name: &str, bytes: usize| json!({ "name": name, "description": "x".repeat(bytes - 28 - name.len()) });
    assert_eq!(tool("a", 100).to_string().len(), 100);
    assert_eq!(status(json!([tool("a", 100)])).await, 200);
    assert_eq!(status(json!([tool("a", 101)])).await, 422);
    assert_eq!(status(json!([tool("a", 75), tool("b", 75)])).await, 200);
    assert_eq!(status(json!([tool("a", 75), tool("b", 76)])).await, 422);
    assert_eq!(status(json!([{ "name": "a", "_meta": { "k": [[[]]] } }])).await, 200);
    assert_eq!(status(json!([{ "name": "a", "_meta": { "k": [[[[[]]]]] } }])).await, 400);
}

#[tokio::test]
async fn bodies_are_bounded() {
    let server =
        TestServer::start(&[("MAX_BODY_BYTES", "20000"), ("MAX_TOOLS_BYTES", "20000"), ("MAX_TOOL_BYTES", "20000")])
            .await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    let body = |bytes: usize| {
        let empty = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":{"x":""}}}"#;
        empty.replace("\"\"", &format!("\"{}\"", "x".repeat(bytes - empty.len())))
    };
    assert_eq!(app.client().post(body(20_000)).await.status, 200);
    let reply = app.client().post(body(20_001)).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (413, &json!(413)));
    assert!(reply.text.contains("20001 bytes") && reply.text.contains("the limit is 20000"), "{}", reply.text);
    // A body without a length is counted as it comes.
    let chunked = futures_util::stream::iter(
        body(20_001).into_bytes().chunks(1000).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect::<Vec<_>>(),
    );
    let request = app.client().request("").body(reqwest::Body::wrap_stream(chunked));
    assert_eq!(send(request).await.status, 413);
    let registration = json!({ "device_id": "d", "x": "x".repeat(20_000) });
    let reply = send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&registration)).await;
    assert_eq!(reply.status, 413);
    assert!(reply.json()["detail"].is_string());
}

#[tokio::test]
async fn whoever_sends_too_much_reads_why_it_is_refused() {
    let server = TestServer::start(&[("APP_TOKEN", "app-secret"), ("OPENCLAW_TOKEN", "claw-secret")]).await;
    let body = "x".repeat(3_500_000);
    for _ in 0..5 {
        let sessions = format!("{}/v1/chat/sessions", server.base);
        let mcp = format!("{}/v1/mcp", server.base);
        let json =
            |request: reqwest::RequestBuilder| request.header("content-type", "application/json").body(body.clone());
        assert_eq!(send(json(http().post(&sessions))).await.status, 401);
        assert_eq!(send(json(http().post(&mcp))).await.status, 401);
        assert_eq!(send(http().post(&mcp).bearer_auth("claw-secret").body(body.clone())).await.status, 415);
        assert_eq!(send(json(http().put(&mcp)).bearer_auth("claw-secret")).await.status, 405);
    }
}

#[tokio::test]
async fn calls_in_flight_are_bounded() {
    let server = TestServer::start(&[("MAX_CALLS_PER_SESSION", "2")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let calls = [app.client().spawn_call("1", "slow", "{}"), app.client().spawn_call("2", "slow", "{}")];
    let invoked = [bridge.invoked().await, bridge.invoked().await];
    let busy = app.client().call("echo", "{}").await;
    assert!(busy.is_tool_error());
    assert_eq!(busy.tool_text(), "Too many calls in flight for this session (2). Retry in 1 s.");
    bridge.answer(&invoked[0].0, r#""ok":true"#).await;
    // A slot is free again.
    let [first, second] = calls;
    let third = {
        soon(async {
            tokio::select! { _ = first => {}, _ = second => {} }
        })
        .await;
        app.client().spawn_call("3", "echo", "{}")
    };
    bridge.answer_next(r#""ok":true,"content":"in""#).await;
    assert_eq!(third.await.unwrap().tool_text(), "in");
}

/// A tools/call of so many bytes.
fn call_of(bytes: usize) -> String {
    let empty = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","arguments":{"x":""}}}"#;
    empty.replace("\"\"", &format!("\"{}\"", "x".repeat(bytes - empty.len())))
}

const SMALL_BODIES: [(&str, &str); 3] =
    [("MAX_BODY_BYTES", "20000"), ("MAX_TOOLS_BYTES", "20000"), ("MAX_TOOL_BYTES", "20000")];

#[tokio::test]
async fn the_bytes_of_a_sessions_calls_in_flight_are_bounded() {
    let server = TestServer::start(&[&SMALL_BODIES[..], &[("MAX_CALL_BYTES_PER_SESSION", "40000")]].concat()).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let start = |bytes: usize| {
        let client = client.clone();
        tokio::spawn(async move { client.post(call_of(bytes)).await })
    };
    let calls = [start(20_000), start(20_000)];
    let (first, _) = (bridge.invoked().await.0, bridge.invoked().await);
    let busy = client.post(call_of(100)).await;
    assert!(busy.is_tool_error());
    assert_eq!(
        busy.tool_text(),
        "The calls in flight for this session hold too much (limit: 40000 bytes). Retry in 1 s."
    );
    bridge.answer(&first, r#""ok":true"#).await;
    let [one, other] = calls;
    soon(async {
        tokio::select! { _ = one => {}, _ = other => {} }
    })
    .await;
    let next = start(20_000);
    bridge.answer_next(r#""ok":true,"content":"in""#).await;
    assert_eq!(next.await.unwrap().tool_text(), "in");

    // The frame of a call that may be sent again is kept, too.
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["resume"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    assert_eq!(bridge.recv().await["type"], "hello");
    let client = app.client();
    let _call = tokio::spawn({
        let client = client.clone();
        async move { client.post(call_of(19_000)).await }
    });
    bridge.invoked().await;
    assert!(client.post(call_of(1001)).await.tool_text().contains("hold too much"));
    let fits = tokio::spawn(async move { client.post(call_of(1000)).await });
    bridge.answer_next(r#""ok":true,"content":"in""#).await;
    assert_eq!(fits.await.unwrap().tool_text(), "in");
}

#[tokio::test]
async fn the_bytes_of_requests_in_memory_are_bounded_and_small_ones_get_through() {
    let server = TestServer::start(&[&SMALL_BODIES[..], &[("MAX_REQUEST_BYTES", "40000")]].concat()).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let client = app.client();
    let start = |bytes: usize| {
        let client = client.clone();
        tokio::spawn(async move { client.post(call_of(bytes)).await })
    };
    let calls = [start(20_000), start(20_000)];
    let (first, _) = (bridge.invoked().await.0, bridge.invoked().await);
    let full = client.post(call_of(16_385)).await;
    assert_eq!((full.status, full.header("retry-after"), &full.json()["error"]["code"]), (503, Some("1"), &json!(503)));
    assert!(full.text.contains("limit: 40000 bytes"), "{}", full.text);
    let registration = json!({ "device_id": "d", "x": "x".repeat(17_000) });
    let create = async || send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&registration)).await;
    assert_eq!(create().await.status, 503);
    let small = start(16_000);
    bridge.answer_next(r#""ok":true,"content":"small""#).await;
    assert_eq!(small.await.unwrap().tool_text(), "small");
    bridge.answer(&first, r#""ok":true"#).await;
    let [one, other] = calls;
    soon(async {
        tokio::select! { _ = one => {}, _ = other => {} }
    })
    .await;
    assert_eq!(create().await.status, 200);
    let next = start(20_000);
    bridge.answer_next(r#""ok":true,"content":"in""#).await;
    assert_eq!(next.await.unwrap().tool_text(), "in");

    // One that is still on its way counts with what has come of it.
    let path = app.mcp_url.split_once(&format!(":{}", server.port)).unwrap().1;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20000\r\n\r\n"
    );
    let mut slow = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    slow.write_all(format!("{head}{}", " ".repeat(19_999)).as_bytes()).await.unwrap();
    until(async || create().await.status == 503).await;
    drop(slow);
    until(async || create().await.status == 200).await;
}

#[tokio::test]
async fn the_frames_of_calls_that_resume_count_among_the_bytes_of_requests() {
    let server = TestServer::start(&[&SMALL_BODIES[..], &[("MAX_REQUEST_BYTES", "40000")]].concat()).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["resume"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    assert_eq!(bridge.recv().await["type"], "hello");
    let client = app.client();
    let call = tokio::spawn({
        let client = client.clone();
        async move { client.post(call_of(20_000)).await }
    });
    let (id, _, _) = bridge.invoked().await;
    assert_eq!(client.post(call_of(16_385)).await.status, 503);
    bridge.answer(&id, r#""ok":true"#).await;
    call.await.unwrap();
    let next = tokio::spawn(async move { client.post(call_of(20_000)).await });
    bridge.answer_next(r#""ok":true,"content":"in""#).await;
    assert_eq!(next.await.unwrap().tool_text(), "in");
}

#[tokio::test]
async fn the_bytes_that_wait_for_an_app_are_bounded() {
    let settings = [("MAX_QUEUE_BYTES", "20000"), ("RESUME_GRACE_SECONDS", "60"), ("STREAM_AFTER_SECONDS", "60")];
    let server = TestServer::start(&[&SMALL_BODIES[..], &settings].concat()).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["resume"] });
    let app = App::register_with(&server, registration).await;
    // What is called while the app is away for a moment waits for its return.
    drop(app.connect().await);
    app.wait_connected(false).await;
    let client = app.client();
    let start = |bytes: usize| {
        let client = client.clone();
        tokio::spawn(async move { client.post(call_of(bytes)).await })
    };
    let first = start(10_000);
    until(async || app.status().await.json()["calls_in_flight"] == 1).await;
    let full = client.post(call_of(10_001)).await;
    assert_eq!(full.tool_text(), "Too much waits to be sent to this app (limit: 20000 bytes). Retry in 1 s.");
    let second = start(9000);
    until(async || app.status().await.json()["calls_in_flight"] == 2).await;
    let mut bridge = app.connect().await;
    assert_eq!(bridge.recv().await["type"], "hello");
    for call in [first, second] {
        bridge.answer_next(r#""ok":true,"content":"in""#).await;
        assert_eq!(call.await.unwrap().tool_text(), "in");
    }
}

#[tokio::test]
async fn sessions_are_bounded() {
    let server = TestServer::start(&[("MAX_SESSIONS_PER_TENANT", "2")]).await;
    let (first, _second) = (App::register(&server).await, App::register(&server).await);
    let create = async || {
        send(http().post(format!("{}/v1/chat/sessions", server.base)).json(&json!({ "device_id": "d" }))).await
    };
    let full = create().await;
    assert_eq!((full.status, full.header("retry-after")), (429, Some("1")));
    assert!(full.json()["detail"].as_str().unwrap().contains('2'));
    first.delete().await;
    assert_eq!(create().await.status, 200);
}

#[tokio::test]
async fn arguments_may_nest_as_deep_as_allowed() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    app.connect().await.echo();
    // Two of the 64 levels are the request's own.
    let deep = |levels: usize| format!(r#"{{"x":{}{}}}"#, "[".repeat(levels - 1), "]".repeat(levels - 1));
    assert!(!app.client().call("echo", &deep(61)).await.is_tool_error());
    let reply = app.client().call("echo", &deep(63)).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!(-32600)));
    assert!(reply.text.contains("64 levels"));
}

#[tokio::test]
async fn headers_are_bounded_in_size_and_time() {
    let server = TestServer::start(&[("MAX_HEADER_BYTES", "8192"), ("HEADER_TIMEOUT_SECONDS", "0.5")]).await;
    let request = |bytes: usize| {
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: {}\r\n\r\n", "x".repeat(bytes))
    };
    assert!(server.raw(request(7000).as_bytes(), Duration::from_secs(5)).await.starts_with("HTTP/1.1 200"));
    assert!(server.raw(request(9000).as_bytes(), Duration::from_secs(5)).await.starts_with("HTTP/1.1 431"));
    for slow in [&b""[..], b"GET /health HTTP/1.1\r\nHost: loc"] {
        let (answer, took) = timed(server.raw(slow, Duration::from_secs(10))).await;
        assert_eq!(answer, "");
        assert!((400..3000).contains(&took.as_millis()), "{took:?}");
    }
}

#[tokio::test]
async fn an_idle_connection_may_stay_longer_than_a_head_may_take() {
    let server = TestServer::start(&[("HEADER_TIMEOUT_SECONDS", "0.3"), ("IDLE_SECONDS", "1.2")]).await;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let mut get = async || {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = [0; 4096];
        let read = soon(stream.read(&mut answer)).await.unwrap();
        assert!(answer[..read].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..read]));
    };
    get().await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    get().await;
    let (closed, took) = timed(async { soon(stream.read(&mut [0; 64])).await.unwrap() }).await;
    assert_eq!(closed, 0);
    assert!((1000..4000).contains(&took.as_millis()), "{took:?}");
}

#[tokio::test]
async fn slow_bodies_end() {
    let start = async |idle: &str, in_all: &str| {
        let server = TestServer::start(&[("BODY_IDLE_SECONDS", idle), ("BODY_TIMEOUT_SECONDS", in_all)]).await;
        let app = App::register(&server).await;
        let path = app.mcp_url.split_once("/v1").unwrap().1;
        let head = format!(
            "POST /v1{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        );
        (server, head)
    };
    // Nothing comes.
    let (server, head) = start("0.3", "60").await;
    let (answer, took) = timed(server.raw(format!("{head}{{").as_bytes(), Duration::from_secs(10))).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!((250..3000).contains(&took.as_millis()), "{took:?}");
    // A byte comes now and then.
    let (server, head) = start("60", "0.8").await;
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let drip = tokio::spawn(async move {
        while writer.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    let (answer, took) = timed(async {
        let mut answer = vec![0; 4096];
        let read = soon(reader.read(&mut answer)).await.unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    })
    .await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!((700..4000).contains(&took.as_millis()), "{took:?}");
    drip.abort();
}

#[tokio::test]
async fn a_client_that_takes_nothing_of_its_answer_is_dropped() {
    let server = TestServer::start(&[("WRITE_STALL_SECONDS", "0.5")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let path = app.mcp_url.split_once("/v1").unwrap().1;
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo"}}"#;
    let request = format!(
        "POST /v1{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(([127, 0, 0, 1], server.port).into()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    bridge.answer_next(&format!(r#""ok":true,"content":"{}""#, "x".repeat(9_000_000))).await;
    // Without reading it sees that by what it writes.
    soon(async {
        while stream.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    let mut answer = Vec::new();
    let _reset = soon(stream.read_to_end(&mut answer)).await;
    assert!(answer.starts_with(b"HTTP/1.1 200") && answer.len() < 9_000_000, "{} bytes came", answer.len());
}

#[tokio::test]
async fn connections_are_bounded() {
    let server = TestServer::start(&[("MAX_CONNECTIONS", "3")]).await;
    let get = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let app = App::register(&server).await;
    // A bridge is a connection, too.
    let bridge = app.connect().await;
    crate::support::until(async || server.raw(get, Duration::from_secs(5)).await.starts_with("HTTP/1.1 200")).await;
    let mut held = Vec::new();
    while held.len() < 2 {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let _reset = stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        // A connection that was answered gives back its place a moment later, so this one may be refused.
        if let Ok(1..) = soon(stream.read(&mut [0; 1])).await {
            held.push(stream);
        }
    }
    crate::support::until(async || {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let _reset = stream.write_all(get).await;
        let mut answer = Vec::new();
        let _reset = soon(stream.read_to_end(&mut answer)).await;
        answer.is_empty()
    })
    .await;
    drop(bridge);
    crate::support::until(async || server.raw(get, Duration::from_secs(5)).await.starts_with("HTTP/1.1 200")).await;
}

#[tokio::test]
async fn a_bridge_that_went_takes_no_place_while_its_calls_wait_for_the_app() {
    let server = TestServer::start(&[("MAX_CONNECTIONS", "3")]).await;
    let registration = json!({ "device_id": "d", "bridge_features": ["resume"] });
    let app = App::register_with(&server, registration).await;
    for _ in 0..10 {
        drop(app.connect().await);
        app.wait_connected(false).await;
    }
    assert_eq!(app.status().await.json()["bridge"]["epoch"], 10);
}

#[tokio::test]
async fn requests_a_second_are_bounded_by_address_and_by_tenant() {
    let settings = [("TRUSTED_PROXIES", "127.0.0.1"), ("MAX_REQUESTS_PER_SECOND_PER_ADDRESS", "3")];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    let list = async |address: &str| app.client().header("x-forwarded-for", address).rpc("1", "tools/list", "{}").await;
    for address in ["9.9.9.1", "6.6.6.6, 9.9.9.2"] {
        assert_eq!([list(address).await.status, list(address).await.status, list(address).await.status], [200; 3]);
        let refused = list(address).await;
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
        assert!(refused.text.contains("3 a second"), "{}", refused.text);
    }
    let show = async || send(http().get(app.session_url()).header("x-forwarded-for", "9.9.9.1")).await.status;
    assert_eq!(show().await, 429, "apps and clients of an address share its bucket");
    until(async || show().await == 200).await;

    let server = TestServer::start(&[("MAX_REQUESTS_PER_SECOND_PER_TENANT", "2")]).await;
    let app = App::register(&server).await;
    assert_eq!(app.client().rpc("1", "tools/list", "{}").await.status, 200);
    assert_eq!(app.client().rpc("1", "tools/list", "{}").await.status, 429);
    until(async || app.client().rpc("1", "tools/list", "{}").await.status == 200).await;
}

#[tokio::test]
async fn changes_of_a_sessions_tools_are_bounded_however_they_come() {
    let server = TestServer::start(&[("MAX_TOOL_UPDATES_PER_MINUTE", "4")]).await;
    let app = App::register_with(&server, json!({ "device_id": "d", "bridge_features": ["tools"] })).await;
    let mut bridge = app.connect().await;
    let put = async |app: &App, tools: serde_json::Value| {
        send(http().put(format!("{}/tools", app.session_url())).json(&json!({ "tools": tools }))).await
    };
    let mut update = async |tools: serde_json::Value| {
        bridge.send(json!({ "type": "update_tools", "tools": tools })).await;
        bridge.recv().await
    };
    assert_eq!(update(tools(&["a"])).await, json!({ "type": "tools_updated", "count": 1 }));
    assert_eq!(update(json!([{ "name": "" }])).await["type"], "error", "what is refused counts as well");
    assert_eq!(put(&app, tools(&["b"])).await.status, 200);
    assert_eq!(put(&app, json!([7])).await.status, 422);
    let says = "Too many changes of this session's tools (4 a minute). Retry in 15 s.";
    assert_eq!(update(tools(&["c"])).await, json!({ "type": "error", "message": says }));
    let refused = put(&app, tools(&["c"])).await;
    assert_eq!((refused.status, refused.json()), (429, json!({ "detail": says })));
    let list = app.client().rpc("1", "tools/list", "{}").await.json();
    assert_eq!(list["result"]["tools"][0]["name"], "b");
    // The bridge stays, and others are not held up.
    let other = App::register(&server).await;
    assert_eq!(put(&other, tools(&["d"])).await.status, 200);
    assert_eq!(app.status().await.json()["bridge"]["connected"], true);
}

#[tokio::test]
async fn who_has_no_token_may_not_ask_often() {
    let settings =
        [("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token"), ("MAX_DENIALS_PER_SECOND_PER_ADDRESS", "2")];
    let server = TestServer::start(&settings).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "app-token").await;
    let statuses = async || {
        let wrong = http().get(app.session_url()).bearer_auth("wrong");
        let client = app.client().rpc("1", "ping", "{}").await;
        [send(wrong).await.status, client.status]
    };
    assert_eq!(statuses().await, [401, 401]);
    assert_eq!(statuses().await, [429, 429]);
    // Those who have one are not held up by it.
    for _ in 0..5 {
        assert_eq!(app.status().await.status, 200);
        let client = app.client().header("authorization", "Bearer claw-token");
        assert_eq!(client.rpc("1", "ping", "{}").await.status, 200);
    }
}

#[tokio::test]
async fn few_sockets_are_open_only_to_be_refused() {
    let settings =
        [("APP_TOKEN", "app-token"), ("MAX_REFUSED_SOCKETS", "1"), ("MAX_DENIALS_PER_SECOND_PER_ADDRESS", "0")];
    let server = TestServer::start(&settings).await;
    let mut app = App::register_as(&server, json!({ "device_id": "d" }), "app-token").await;
    let path = app.bridge_url.split_once(&format!(":{}", server.port)).unwrap().1.to_owned();
    let upgrade = |token: &str| {
        format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
    };
    // One that does not take its close frame's answer to heart holds its place for a while.
    let mut held = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    held.write_all(upgrade("wrong").as_bytes()).await.unwrap();
    let mut first = [0; 12];
    held.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 101");
    let answer = server.raw(upgrade("wrong").as_bytes(), Duration::from_millis(300)).await;
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    // An app with its token is not kept out.
    app.token = "app-token".into();
    app.connect().await;
    drop(held);
    until(async || {
        server.raw(upgrade("wrong").as_bytes(), Duration::from_millis(300)).await.starts_with("HTTP/1.1 101")
    })
    .await;
}

/// The beginning of a WebSocket text frame of `length` bytes, masked with zeros, with `sent` of its bytes.
fn begun_frame(length: usize, sent: usize) -> Vec<u8> {
    let mut frame = vec![0x81];
    match u16::try_from(length) {
        Ok(length) => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&length.to_be_bytes());
        }
        Err(_) => {
            frame.push(0x80 | 127);
            frame.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(&[0; 4]);
    frame.resize(frame.len() + sent, b' ');
    frame
}

/// What the server's operator sees.
async fn status(server: &TestServer) -> serde_json::Value {
    send(http().get(format!("{}/status.json", server.admin.as_ref().unwrap()))).await.json()
}

/// How many bytes of requests and messages are in memory.
async fn in_memory(server: &TestServer) -> u64 {
    status(server).await["request_bytes"]["now"].as_u64().unwrap()
}

async fn write_raw(bridge: &mut crate::support::Bridge, bytes: &[u8]) {
    soon(bridge.socket.get_mut().write_all(bytes)).await.unwrap();
}

#[tokio::test]
async fn messages_that_arrive_count_among_the_bytes_in_memory() {
    let settings =
        [("MAX_REQUEST_BYTES_PER_TENANT", "50000"), ("WRITE_STALL_SECONDS", "1"), ("ADMIN_LISTEN", "127.0.0.1:0")];
    let server = TestServer::start(&[&SMALL_BODIES[..], &settings].concat()).await;
    let [first, second, third] =
        [App::register(&server).await, App::register(&server).await, App::register(&server).await];
    let [mut one, mut two, mut three] = [first.connect().await, second.connect().await, third.connect().await];
    write_raw(&mut one, &begun_frame(100_000, 30_000)).await;
    let call = |bytes: usize| {
        let client = third.client();
        tokio::spawn(async move { client.post(call_of(bytes)).await })
    };
    // What has come of it leaves room for a small request and none for a large one.
    until(async || in_memory(&server).await >= 30_000).await;
    assert_eq!(third.client().post(call_of(20_000)).await.status, 429);
    let small = call(16_000);
    three.answer_next(r#""ok":true,"content":"small""#).await;
    assert_eq!(small.await.unwrap().tool_text(), "small");
    // A second message waits for room. It gets it once the first is gone.
    write_raw(&mut two, &begun_frame(40_000, 30_000)).await;
    drop(one);
    first.wait_connected(false).await;
    write_raw(&mut two, &[b' '; 10_000]).await;
    let answered = second.client().spawn_call("1", "echo", "{}");
    loop {
        let frame = two.recv().await;
        if frame["type"] == "invoke_tool" {
            two.answer(frame["request_id"].as_str().unwrap(), r#""ok":true,"content":"still there""#).await;
            break;
        }
    }
    assert_eq!(answered.await.unwrap().tool_text(), "still there");
    // And where there is none, it waits no longer than the clock allows.
    write_raw(&mut two, &begun_frame(100_000, 40_000)).await;
    until(async || in_memory(&server).await >= 40_000).await;
    write_raw(&mut three, &begun_frame(100_000, 40_000)).await;
    assert_eq!(three.closed().await.0, 1013);
    second.wait_connected(true).await;
}

#[tokio::test]
async fn a_result_without_room_fails_its_call_and_not_the_bridge() {
    let settings = [("MAX_REQUEST_BYTES_PER_TENANT", "50000"), ("ADMIN_LISTEN", "127.0.0.1:0")];
    let server = TestServer::start(&[&SMALL_BODIES[..], &settings].concat()).await;
    let app = App::register(&server).await;
    let other = App::register(&server).await;
    let (mut bridge, mut holding) = (app.connect().await, other.connect().await);
    write_raw(&mut holding, &begun_frame(100_000, 20_000)).await;
    until(async || in_memory(&server).await >= 20_000).await;
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(&format!(r#""ok":true,"content":"{}""#, "x".repeat(31_000))).await;
    let lost = call.await.unwrap();
    assert!(lost.is_tool_error() && lost.tool_text().contains("limit: 50000 bytes"), "{}", lost.text);
    // Also one that comes in two pieces leaves nothing behind, and one that is no text.
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    let before = in_memory(&server).await;
    let session = &bridge.id;
    let frame = format!(
        r#"{{"type":"invoke_result","mcpSessionId":"{session}","request_id":"{id}","ok":true,"content":"{}"}}"#,
        "x".repeat(31_000)
    );
    let (first, second) = frame.split_at(20_000);
    let mut begun = begun_frame(frame.len(), 0);
    begun.extend_from_slice(first.as_bytes());
    write_raw(&mut bridge, &begun).await;
    until(async || in_memory(&server).await >= before + 20_000).await;
    write_raw(&mut bridge, second.as_bytes()).await;
    assert!(call.await.unwrap().tool_text().contains("limit: 50000 bytes"));
    until(async || in_memory(&server).await == before).await;
    let mut binary = begun_frame(25_000, 24_000);
    binary[0] = 0x82;
    write_raw(&mut bridge, &binary).await;
    until(async || in_memory(&server).await >= before + 24_000).await;
    write_raw(&mut bridge, &[b' '; 1000]).await;
    until(async || in_memory(&server).await == before).await;
    for bytes in [16_000, 29_000] {
        let call = app.client().spawn_call("1", "echo", "{}");
        bridge.answer_next(&format!(r#""ok":true,"content":"{}""#, "x".repeat(bytes))).await;
        assert_eq!(call.await.unwrap().tool_text().len(), bytes);
    }
}

#[tokio::test]
async fn a_result_counts_until_its_client_has_it() {
    let settings = [
        ("MAX_REQUEST_BYTES_PER_TENANT", "9000000"),
        ("WRITE_STALL_SECONDS", "600"),
        ("STREAM_AFTER_SECONDS", "60"),
        // The app does not read all the time.
        ("PING_SECONDS", "600"),
        ("ADMIN_LISTEN", "127.0.0.1:0"),
    ];
    let server = TestServer::start(&settings).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let path = app.mcp_url.split_once(&format!(":{}", server.port)).unwrap().1;
    let body = call_of(200);
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    for accept in ["application/json", "text/event-stream"] {
        let head = head.replace("\r\n\r\n", &format!("\r\nAccept: {accept}\r\n\r\n"));
        // It takes in little by itself.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut unread = socket.connect(([127, 0, 0, 1], server.port).into()).await.unwrap();
        unread.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        let large = format!(r#""ok":true,"content":"{}""#, "x".repeat(5_000_000));
        bridge.answer_next(&large).await;
        until(async || in_memory(&server).await > 5_000_000).await;
        // Large answers take their time in an unoptimized build.
        let call = || {
            let request = app.client().request(call_of(200));
            tokio::spawn(async move { request.send().await.unwrap().text().await.unwrap() })
        };
        let met = async || status(&server).await["limits"]["max_request_bytes_per_tenant"].as_u64().unwrap_or(0);
        let met_before = met().await;
        let second = call();
        let (id, _, _) = bridge.invoked().await;
        // What is still arriving waits until the first client has read; what is there already has no room.
        let reading = async {
            until(async || met().await > met_before).await;
            let was_there = second.is_finished();
            let (mut read, mut piece) = (0, vec![0; 1 << 20]);
            while read < 5_000_000 {
                read += soon(unread.read(&mut piece)).await.unwrap();
            }
            was_there
        };
        let ((), was_there) = tokio::join!(bridge.answer(&id, &large), reading);
        let second = second.await.unwrap();
        assert!(second.len() > 5_000_000 && !was_there || second.contains("its result is lost"), "{accept}");
        until(async || in_memory(&server).await == 0).await;
    }
}

#[tokio::test]
async fn a_message_may_not_take_for_ever() {
    let server = TestServer::start(&[("MESSAGE_TIMEOUT_SECONDS", "1"), ("PING_SECONDS", "0.2")]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    write_raw(&mut bridge, &begun_frame(1_000, 100)).await;
    // It goes on arriving, so it is not silent. Nothing is read as a WebSocket: a pong would stand inside the message.
    let mut told = Vec::new();
    while !String::from_utf8_lossy(&told).contains("A message took too long to arrive.") {
        let reading = bridge.socket.get_mut().read_buf(&mut told);
        if let Ok(read) = tokio::time::timeout(Duration::from_millis(100), reading).await {
            assert!(read.unwrap() > 0, "{:?}", String::from_utf8_lossy(&told));
            continue;
        }
        write_raw(&mut bridge, b" ").await;
    }
}

#[tokio::test]
async fn one_address_does_not_take_all_connections() {
    let settings = [("TRUSTED_PROXIES", "127.0.0.9"), ("MAX_CONNECTIONS_PER_ADDRESS", "2"), ("MAX_CONNECTIONS", "5")];
    let server = TestServer::start(&settings).await;
    let from = async |ip: [u8; 4]| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((ip, 0).into()).unwrap();
        socket.connect(([127, 0, 0, 1], server.port).into()).await.unwrap()
    };
    let is_served = async |stream: &mut TcpStream| {
        let _reset = stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let mut answer = [0; 12];
        soon(stream.read_exact(&mut answer)).await.is_ok() && answer == *b"HTTP/1.1 200"
    };
    let mut held = [from([127, 0, 0, 2]).await, from([127, 0, 0, 2]).await];
    for stream in &mut held {
        assert!(is_served(stream).await);
    }
    assert!(!is_served(&mut from([127, 0, 0, 2]).await).await);
    assert!(is_served(&mut from([127, 0, 0, 3]).await).await);
    // Behind a reverse proxy all come from its address.
    let mut fronts = [from([127, 0, 0, 9]).await, from([127, 0, 0, 9]).await, from([127, 0, 0, 9]).await];
    for stream in &mut fronts {
        assert!(is_served(stream).await);
    }
    drop((held, fronts));
    until(async || is_served(&mut from([127, 0, 0, 2]).await).await).await;
}
