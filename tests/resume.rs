//! Calls that outlive the socket that carried them, for apps that registered `resume`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::sync::Mutex;
use tokio_tungstenite::tungstenite::Message;

use crate::program::serving;
use crate::support::{App, Bridge, Relay, TestServer, random, soon, timed, tools, until};

async fn resuming_app(server: &TestServer) -> App {
    resuming_app_at(&server.base).await
}

async fn resuming_app_at(base: &str) -> App {
    let features = json!(["resume", "cancel", "deadline"]);
    let registration = json!({ "device_id": "d", "tools": tools(&["echo", "slow"]), "bridge_features": features });
    App::register_at(base, registration).await
}

/// Connects and takes the hello: its epoch and pending request ids.
async fn hello(app: &App) -> (Bridge, u64, Vec<String>) {
    let mut bridge = app.connect().await;
    let frame = bridge.recv().await;
    assert_eq!(frame["type"], "hello", "{frame}");
    assert_eq!(frame["mcpSessionId"], app.id.as_str());
    assert!(frame["instance"].is_string() && frame["grace_seconds"].is_number());
    let pending = frame["pending"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    (bridge, frame["epoch"].as_u64().unwrap(), pending)
}

/// The bridge breaks, and the proxy knows it.
async fn cut(app: &App, bridge: Bridge) {
    drop(bridge);
    app.wait_connected(false).await;
}

#[tokio::test]
async fn a_result_that_was_finished_offline_arrives() {
    let server = TestServer::start(&[]).await;
    let app = resuming_app(&server).await;
    let (mut bridge, epoch, pending) = hello(&app).await;
    assert_eq!((epoch, pending.len()), (1, 0));
    let call = app.client().spawn_call("1", "slow", "{}");
    let (request_id, _, _) = bridge.invoked().await;
    cut(&app, bridge).await;
    assert!(!call.is_finished());
    let (mut bridge, epoch, pending) = hello(&app).await;
    assert_eq!((epoch, pending), (2, vec![request_id.clone()]));
    bridge.answer(&request_id, r#""ok":true,"content":"worked on""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "worked on");
    // Once is enough.
    bridge.answer(&request_id, r#""ok":true,"content":"again""#).await;
    let (_, _, pending) = {
        cut(&app, bridge).await;
        hello(&app).await
    };
    assert!(pending.is_empty());
}

#[tokio::test]
async fn a_call_is_sent_again_only_if_the_app_never_saw_it() {
    let server = TestServer::start(&[]).await;
    let app = resuming_app(&server).await;
    let (mut bridge, _, _) = hello(&app).await;
    let call = app.client().spawn_call("1", "echo", r#"{"n":1E2}"#);
    let first = bridge.recv().await;
    assert!(first.get("redelivery").is_none());
    cut(&app, bridge).await;
    let (mut bridge, _, pending) = hello(&app).await;
    bridge.answer(&pending[0], r#""ok":false,"error":{"code":"unknown_request"}"#).await;
    let again = bridge.recv_text().await;
    let frame: Value = serde_json::from_str(&again).unwrap();
    assert_eq!((&frame["request_id"], &frame["redelivery"]), (&first["request_id"], &json!(true)));
    // Lost again, and marked once.
    cut(&app, bridge).await;
    let (mut bridge, _, pending) = hello(&app).await;
    bridge.answer(&pending[0], r#""ok":false,"error":{"code":"unknown_request"}"#).await;
    let again = bridge.recv_text().await;
    assert_eq!(again.matches("redelivery").count(), 1, "{again}");
    assert!(again.contains(r#""arguments":{"n":1E2}"#) && frame["timeout_ms"].as_u64().unwrap() <= 120_000);
    bridge.answer(&pending[0], r#""ok":true,"content":"once""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "once");
    // Of a call that it was sent on this very bridge, an app cannot say so.
    let call = app.client().spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":false,"error":{"code":"unknown_request"}"#).await;
    assert!(soon(call).await.unwrap().is_tool_error());
}

#[tokio::test]
async fn a_call_made_during_the_grace_goes_out_as_new_after_the_hello() {
    let server = TestServer::start(&[]).await;
    let app = resuming_app(&server).await;
    let (bridge, _, _) = hello(&app).await;
    cut(&app, bridge).await;
    let call = app.client().spawn_call("1", "echo", "{}");
    until(async || app.status().await.json()["calls_in_flight"] == 1).await;
    let (mut bridge, _, pending) = hello(&app).await;
    assert!(pending.is_empty(), "{pending:?}");
    let frame = bridge.recv().await;
    assert!(frame["type"] == "invoke_tool" && frame.get("redelivery").is_none());
    bridge.answer(frame["request_id"].as_str().unwrap(), r#""ok":true,"content":"new""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "new");
}

#[tokio::test]
async fn when_the_grace_is_over_each_call_says_what_is_known_of_it() {
    let server = TestServer::start(&[("RESUME_GRACE_SECONDS", "0.5")]).await;
    let app = resuming_app(&server).await;
    let (mut bridge, _, _) = hello(&app).await;
    let sent = app.client().spawn_call("1", "slow", "{}");
    bridge.invoked().await;
    cut(&app, bridge).await;
    let waiting = app.client().spawn_call("2", "slow", "{}");
    let (sent, took) = timed(sent).await;
    let sent = sent.unwrap();
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(
        sent.tool_text(),
        "Bridge disconnected before the tool answered, and the app did not come back within 0.5 s. The tool may have run."
    );
    assert_eq!(soon(waiting).await.unwrap().tool_text(), "Bridge is not connected. The call was not delivered.");
    assert_eq!(app.client().call("echo", "{}").await.tool_text(), "Bridge is not connected.");
    let (_, epoch, pending) = hello(&app).await;
    assert_eq!((epoch, pending.len()), (2, 0));
}

#[tokio::test]
async fn the_grace_does_not_wait_for_a_goodbye_that_nobody_hears() {
    let server = TestServer::start(&[("PING_SECONDS", "0.2"), ("RESUME_GRACE_SECONDS", "0.2")]).await;
    let app = resuming_app(&server).await;
    let (mut silent, _, _) = hello(&app).await;
    let call = app.client().spawn_call("1", "slow", "{}");
    silent.invoked().await;
    // From here on nobody reads it.
    let (reply, took) = timed(soon(call)).await;
    assert!(reply.unwrap().tool_text().ends_with("The tool may have run."));
    assert!(took < Duration::from_millis(1500), "{took:?}");
}

#[tokio::test]
async fn a_call_that_ends_during_the_grace_is_not_pending_any_more() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "1")]).await;
    let app = resuming_app(&server).await;
    let (mut bridge, _, _) = hello(&app).await;
    let aborted = app.client().spawn_call("1", "slow", "{}");
    let timed_out = app.client().spawn_call("2", "slow", "{}");
    let cancelled = app.client().spawn_call("3", "slow", "{}");
    for _ in 0..3 {
        bridge.invoked().await;
    }
    cut(&app, bridge).await;
    aborted.abort();
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":3}}"#;
    app.client().post(cancel).await;
    assert_eq!(soon(cancelled).await.unwrap().tool_text(), "Tool call was cancelled.");
    assert_eq!(soon(timed_out).await.unwrap().tool_text(), "Tool call timed out after 1 s.");
    until(async || app.status().await.json()["calls_in_flight"] == 0).await;
    let (_, _, pending) = hello(&app).await;
    assert!(pending.is_empty(), "{pending:?}");
}

#[tokio::test]
async fn a_queued_call_does_not_start_after_its_time() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.3")]).await;
    let app = resuming_app(&server).await;
    let (bridge, _, _) = hello(&app).await;
    cut(&app, bridge).await;
    let late = app.client().call("echo", "{}").await;
    assert_eq!(late.tool_text(), "Tool call timed out after 0.3 s.");
    let (mut bridge, _, _) = hello(&app).await;
    let call = app.client().spawn_call("2", "echo", r#"{"n":2}"#);
    assert_eq!(bridge.invoked().await.2, json!({ "n": 2 }));
    drop(bridge);
    call.abort();
}

#[tokio::test]
async fn deleting_and_stopping_end_parked_calls_at_once() {
    let server = TestServer::start(&[]).await;
    let (deleted, stopped) = (resuming_app(&server).await, resuming_app(&server).await);
    let mut calls = Vec::new();
    for app in [&deleted, &stopped] {
        let (mut bridge, _, _) = hello(app).await;
        calls.push(app.client().spawn_call("1", "slow", "{}"));
        bridge.invoked().await;
        cut(app, bridge).await;
    }
    deleted.delete().await;
    assert_eq!(soon(calls.remove(0)).await.unwrap().tool_text(), "Chat session was unregistered.");
    let (_, took) = timed(server.stopped()).await;
    assert!(took < Duration::from_secs(3), "the grace holds nothing up: {took:?}");
    // Nobody can come back to a proxy that listens no more.
    assert!(soon(calls.remove(0)).await.unwrap().text.contains("did not come back"));
}

#[tokio::test]
async fn a_silent_bridge_hands_its_calls_to_the_one_that_takes_over() {
    let server = TestServer::start(&[("PROBE_SECONDS", "0.3")]).await;
    let app = resuming_app(&server).await;
    let (mut silent, _, _) = hello(&app).await;
    let call = app.client().spawn_call("1", "slow", "{}");
    let (request_id, _, _) = silent.invoked().await;
    // From here on nobody reads it.
    let mut newcomer = app.dial().await;
    let frame = newcomer.recv().await;
    assert_eq!((&frame["type"], &frame["pending"]), (&json!("hello"), &json!([request_id])));
    // The old socket's answer is not taken any more; the new one's is.
    silent.answer(&request_id, r#""ok":true,"content":"old""#).await;
    newcomer.answer(&request_id, r#""ok":true,"content":"new""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "new");
}

#[tokio::test]
async fn the_last_words_of_a_socket_that_goes_do_not_keep_its_app_out() {
    let server = TestServer::start(&[("PROBE_SECONDS", "1")]).await;
    for goes in [true, false] {
        let app = resuming_app(&server).await;
        let (mut old, _, _) = hello(&app).await;
        let mut newcomer = app.dial().await;
        while !soon(old.socket.next()).await.unwrap().unwrap().is_ping() {}
        // This was on its way when the app dialled anew. Then the old socket closes, or its network is gone.
        old.send(json!({ "type": "pong" })).await;
        let unread = (!goes).then_some(old);
        let frame = newcomer.recv().await;
        assert_eq!((&frame["type"], &frame["epoch"]), (&json!("hello"), &json!(2)));
        drop(unread);
    }
}

/// What happened, in order of nothing: each execution of a call, by its own number.
#[derive(Default)]
struct History {
    executions: Mutex<HashMap<u64, u32>>,
}

/// An app that resumes: keeps what it has finished, executes nothing twice, reconnects at once.
async fn resume_for_ever(app: App, bridge_url: String, history: Arc<History>, connections: Arc<AtomicU64>) {
    let app = App { bridge_url, ..app };
    let finished: Arc<Mutex<HashMap<String, Value>>> = Arc::default();
    let started: Arc<Mutex<HashSet<String>>> = Arc::default();
    loop {
        let Ok(Ok((mut socket, _))) =
            tokio::time::timeout(Duration::from_secs(5), tokio_tungstenite::connect_async(&app.bridge_url)).await
        else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        connections.fetch_add(1, Ordering::Relaxed);
        let (done, mut results) = tokio::sync::mpsc::channel::<Value>(64);
        loop {
            let frame = tokio::select! {
                Some(result) = results.recv() => {
                    if socket.send(Message::text(result.to_string())).await.is_err() { break }
                    continue;
                }
                frame = socket.next() => frame,
            };
            let Some(Ok(message)) = frame else { break };
            let Message::Text(text) = message else { continue };
            let frame: Value = serde_json::from_str(&text).unwrap();
            match frame["type"].as_str().unwrap() {
                "ping" => {
                    let _gone = socket.send(Message::text(r#"{"type":"pong"}"#)).await;
                }
                "hello" => {
                    for id in frame["pending"].as_array().unwrap() {
                        let id = id.as_str().unwrap();
                        let reply = match (finished.lock().await.get(id), started.lock().await.contains(id)) {
                            (Some(result), _) => result.clone(),
                            (None, true) => continue,
                            (None, false) => {
                                json!({ "type": "invoke_result", "mcpSessionId": app.id, "request_id": id, "ok": false, "error": { "code": "unknown_request" } })
                            }
                        };
                        let _gone = socket.send(Message::text(reply.to_string())).await;
                    }
                }
                "invoke_tool" => {
                    let id = frame["request_id"].as_str().unwrap().to_owned();
                    assert!(started.lock().await.insert(id.clone()), "{id} was sent twice");
                    let (finished, history, done, session) =
                        (finished.clone(), history.clone(), done.clone(), app.id.clone());
                    // The work goes on when the socket goes.
                    tokio::spawn(async move {
                        let n = frame["arguments"]["n"].as_u64().unwrap();
                        *history.executions.lock().await.entry(n).or_default() += 1;
                        tokio::time::sleep(Duration::from_millis(20).mul_f64(random())).await;
                        let result = json!({ "type": "invoke_result", "mcpSessionId": session, "request_id": id, "ok": true, "content": { "n": n } });
                        finished.lock().await.insert(id, result.clone());
                        let _gone = done.send(result).await;
                    });
                }
                _ => {}
            }
        }
    }
}

/// The memory that a process has, in kB.
#[cfg(target_os = "linux")]
fn resident(process: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id().unwrap())).unwrap();
    status.split_once("VmRSS:").unwrap().1.split_whitespace().next().unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_calls_over_dying_sockets_run_at_most_once_and_none_hangs() {
    const SESSIONS: usize = 100;
    const CALLS: u64 = 10_000;
    const TIMEOUT: u64 = 20;
    let timeout = TIMEOUT.to_string();
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("TOOL_TIMEOUT_SECONDS", timeout.as_str()),
        ("RESUME_GRACE_SECONDS", "5"),
        ("PROBE_SECONDS", "0.3"),
    ];
    let (proxy, base) = serving(&settings).await;
    let port: u16 = base.rsplit(':').next().unwrap().parse().unwrap();
    // Each connection lives for a random time.
    let cutter = Relay::start(port, Some(Duration::from_millis(400))).await;
    let (history, connections) = (Arc::new(History::default()), Arc::new(AtomicU64::new(0)));
    let mut apps = Vec::new();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..SESSIONS {
        let app = resuming_app_at(&base).await;
        let url = app.bridge_url.replace(&format!(":{port}"), &format!(":{}", cutter.port));
        running.spawn(resume_for_ever(app.clone(), url, history.clone(), connections.clone()));
        apps.push(app);
    }
    for app in &apps {
        app.wait_connected(true).await;
    }
    let next = Arc::new(AtomicU64::new(0));
    let mut callers = tokio::task::JoinSet::new();
    for app in &apps {
        let (client, next) = (app.client(), next.clone());
        callers.spawn(async move {
            let mut outcomes = Vec::new();
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= CALLS {
                    return outcomes;
                }
                // All callers use the same few ids.
                let (reply, took) =
                    timed(client.call_as(&(n % 3).to_string(), "echo", &format!(r#"{{"n":{n}}}"#))).await;
                outcomes.push((n, reply, took));
            }
        });
    }
    until(async || next.load(Ordering::Relaxed) > CALLS / 10).await;
    let memory = resident(&proxy);
    let (mut answered, mut honest) = (0, HashMap::<String, u32>::new());
    while let Some(outcomes) = callers.join_next().await {
        for (n, reply, took) in outcomes.unwrap() {
            // A busy machine is late with the end of a call's time, but not that late.
            assert!(took < Duration::from_secs(2 * TIMEOUT), "{n} hung for {took:?}");
            assert_eq!(reply.status, 200);
            let result = match reply.header("content-type") {
                Some("application/json") => reply.json(),
                _ => serde_json::from_str(reply.text.rsplit("data: ").next().unwrap()).unwrap(),
            };
            let result = &result["result"];
            if result["isError"] == true {
                *honest.entry(result["content"][0]["text"].as_str().unwrap().to_owned()).or_default() += 1;
            } else {
                assert_eq!(result["structuredContent"], json!({ "n": n }), "{n} got another call's answer");
                answered += 1;
            }
        }
    }
    let executions = history.executions.lock().await;
    assert!(executions.values().all(|times| *times == 1), "something ran twice");
    let connections = connections.load(Ordering::Relaxed);
    eprintln!("{answered} answered, {honest:?}; {connections} connections, {} executions", executions.len());
    assert!(connections > 5 * SESSIONS as u64, "only {connections} connections: nothing was cut");
    assert!(answered > CALLS * 9 / 10, "{answered} answered; {honest:?}");
    for app in &apps {
        until(async || app.status().await.json()["calls_in_flight"] == 0).await;
    }
    let memory_after = resident(&proxy);
    eprintln!("{memory} kB after the first tenth, {memory_after} kB after all");
    assert!(memory_after < memory + 4096, "from {memory} kB to {memory_after} kB: something is kept");
}
