//! Stopping: calls finish, bridges are told to come back, nothing hangs.

use std::time::Duration;

use serde_json::json;

use crate::support::{App, TestServer, soon, timed, tools, until};

#[tokio::test]
async fn calls_in_flight_finish_and_bridges_are_closed_with_1012() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    server.begin_stop();
    // The bridge carries the result while the server stops.
    tokio::time::sleep(Duration::from_millis(200)).await;
    bridge.answer(&request_id, r#""ok":true,"content":"finished""#).await;
    let reply = soon(call).await.unwrap();
    assert_eq!(reply.tool_text(), "finished");
    assert_eq!(bridge.closed().await, (1012, "The proxy restarts; connect again. retry_ms=500".into()));
    drop(bridge);
    let (_, took) = timed(server.stopped()).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[tokio::test]
async fn calls_that_do_not_end_in_time_are_answered_all_the_same() {
    let server = TestServer::start(&[("DRAIN_SECONDS", "0.3"), ("STREAM_AFTER_SECONDS", "0.1")]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let stream = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let plain = app.client().spawn_call("2", "slow", "{}");
    bridge.invoked().await;
    let (_, took) = timed(server.stopped()).await;
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert!(soon(stream).await.unwrap().text.contains("shutting down"));
    let plain = soon(plain).await.unwrap();
    assert!(plain.text.contains("shutting down"), "{}", plain.text);
    for _ in 0..2 {
        assert_eq!(bridge.recv().await["type"], "cancel_tool");
    }
    assert_eq!(bridge.closed().await.0, 1012);
}

#[tokio::test]
async fn while_stopping_open_connections_are_told_to_go_elsewhere() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "slow", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    server.begin_stop();
    // Nobody listens any more.
    until(async || tokio::net::TcpStream::connect(("127.0.0.1", server.port)).await.is_err()).await;
    bridge.answer(&request_id, r#""ok":true"#).await;
    soon(call).await.unwrap();
    server.stopped().await;
}

#[tokio::test]
async fn apps_are_told_to_come_back_one_after_another() {
    let server = TestServer::start(&[("RECONNECTS_PER_SECOND", "2")]).await;
    let mut bridges = Vec::new();
    for _ in 0..8 {
        bridges.push(App::register(&server).await.connect().await);
    }
    server.begin_stop();
    let mut returns = Vec::new();
    for bridge in &mut bridges {
        let (code, reason) = bridge.closed().await;
        assert_eq!(code, 1012);
        returns.push(reason.rsplit_once(" retry_ms=").unwrap().1.parse::<u64>().unwrap());
    }
    returns.sort_unstable();
    assert_eq!(returns, [250, 750, 1250, 1750, 2250, 2750, 3250, 3750]);
}

#[tokio::test]
async fn an_idle_server_with_bridges_stops_at_once() {
    let server = TestServer::start(&[]).await;
    let apps = [App::register(&server).await, App::register(&server).await];
    let mut bridges = Vec::new();
    for app in &apps {
        bridges.push(app.connect().await);
    }
    let reading = tokio::spawn(async move {
        let mut codes = Vec::new();
        for bridge in &mut bridges {
            codes.push(bridge.closed().await.0);
        }
        codes
    });
    let (_, took) = timed(server.stopped()).await;
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(json!(reading.await.unwrap()), json!([1012, 1012]));
}
