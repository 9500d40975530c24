//! Hearing of changes of the tools: `subscriptions/listen`, and the GET of older clients.

use std::time::Duration;

use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::{App, Reply, TestServer, http, send, soon, timed, tools, until};

/// An app with a feature or none.
async fn register(server: &TestServer, features: &[&str]) -> App {
    App::register_with(server, json!({ "device_id": "d", "bridge_features": features, "tools": tools(&["a"]) })).await
}

async fn put_tools(app: &App, names: &[&str]) {
    let request = http().put(format!("{}/tools", app.session_url())).json(&json!({ "tools": tools(names) }));
    assert_eq!(send(request).await.status, 200);
}

fn listen(app: &App, id: &str, filter: Value) -> RequestBuilder {
    app.client().modern_request(id, "subscriptions/listen", json!({ "notifications": filter }), json!({}))
}

/// Listens to changes of the tools, past the acknowledgement.
async fn subscribe(app: &App, id: &str) -> Events {
    let mut events = Events::of(listen(app, id, json!({ "toolsListChanged": true }))).await;
    assert_eq!(events.next().await.unwrap()["method"], "notifications/subscriptions/acknowledged");
    events
}

fn list_changed(id: Value) -> Value {
    let meta = json!({ "io.modelcontextprotocol/subscriptionId": id });
    json!({ "jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": { "_meta": meta } })
}

fn error(reply: &Reply) -> (u16, Value) {
    (reply.status, reply.json()["error"]["code"].clone())
}

/// An event stream.
struct Events {
    response: Response,
    text: String,
    comments: usize,
}

impl Events {
    async fn of(request: RequestBuilder) -> Events {
        let response = soon(request.send()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        Events { response, text: String::new(), comments: 0 }
    }

    /// The next event's message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let message = block.strip_prefix("event: message\ndata: ").map(serde_json::from_str);
                self.text = rest.to_owned();
                match message {
                    Some(message) => return Some(message.unwrap()),
                    None => self.comments += 1,
                }
            }
            let chunk = soon(self.response.chunk()).await.unwrap()?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// The result that ends a subscription, and that nothing follows it.
    async fn ended(mut self) -> Value {
        let end = self.next().await.unwrap();
        assert_eq!(end["result"]["resultType"], "complete", "{end}");
        assert_eq!(self.next().await, None);
        end
    }
}

#[tokio::test]
async fn a_subscriber_hears_of_each_way_to_change_the_tools() {
    let server = TestServer::start(&[]).await;
    let app = register(&server, &["tools"]).await;
    let discovered = app.client().modern("server/discover", json!({})).await.json();
    assert_eq!(discovered["result"]["capabilities"], json!({ "tools": { "listChanged": true } }));
    let filter = json!({ "toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": ["x:y"] });
    let mut events = Events::of(listen(&app, r#""s/1""#, filter)).await;
    let acknowledged = json!({
        "jsonrpc": "2.0",
        "method": "notifications/subscriptions/acknowledged",
        "params": {
            "_meta": { "io.modelcontextprotocol/subscriptionId": "s/1" },
            "notifications": { "toolsListChanged": true },
        },
    });
    assert_eq!(events.next().await, Some(acknowledged));

    put_tools(&app, &["a", "b"]).await;
    assert_eq!(events.next().await, Some(list_changed(json!("s/1"))));

    let mut bridge = app.connect().await;
    bridge.send(json!({ "type": "update_tools", "tools": tools(&["c"]) })).await;
    assert_eq!(bridge.recv().await, json!({ "type": "tools_updated", "count": 1 }));
    assert_eq!(events.next().await, Some(list_changed(json!("s/1"))));

    // The same list again is no change, so the next thing is the end.
    put_tools(&app, &["c"]).await;
    app.delete().await;
    let end = events.ended().await;
    assert_eq!(end["id"], "s/1");
    let meta = &end["result"]["_meta"];
    assert_eq!(meta["io.modelcontextprotocol/subscriptionId"], "s/1");
    assert_eq!(meta["io.modelcontextprotocol/serverInfo"]["name"], "openclaw-mcp-proxy");
}

#[tokio::test]
async fn rmcp_hears_of_changes_and_of_the_end() {
    use rmcp::model::{ClientConfig, ProtocolVersion, ServerNotification, SubscriptionFilter};
    use rmcp::service::SubscriptionEnd;
    use rmcp::transport::StreamableHttpClientTransport;
    use rmcp::{ClientLifecycleMode, ClientServiceExt};

    let server = TestServer::start(&[]).await;
    let app = register(&server, &["tools"]).await;
    let modern = ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] };
    let transport = StreamableHttpClientTransport::from_uri(app.mcp_url.clone());
    let client = soon(ClientConfig::default().serve_with_lifecycle(transport, modern)).await.unwrap();
    let filter = SubscriptionFilter::builder().tools_list_changed().prompts_list_changed().build();
    let mut subscription = soon(client.listen(filter)).await.unwrap();
    assert_eq!(subscription.acknowledged().prompts_list_changed, None);
    put_tools(&app, &["b"]).await;
    let heard = soon(subscription.next()).await.unwrap();
    assert!(matches!(heard, Some(ServerNotification::ToolListChangedNotification(_))), "{heard:?}");
    app.delete().await;
    assert!(soon(subscription.next()).await.unwrap().is_none());
    let end = subscription.end();
    assert!(matches!(end, Some(SubscriptionEnd::Graceful(_))), "{end:?}");
}

#[tokio::test]
async fn two_subscribers_with_one_id_both_hear_and_only_of_their_own_session() {
    let server = TestServer::start(&[]).await;
    let (one, other) = (register(&server, &["tools"]).await, register(&server, &["tools"]).await);
    let (mut first, mut second) = (subscribe(&one, "1").await, subscribe(&one, "1").await);
    let elsewhere = subscribe(&other, "1").await;
    put_tools(&one, &["b"]).await;
    assert_eq!(first.next().await, Some(list_changed(json!(1))));
    assert_eq!(second.next().await, Some(list_changed(json!(1))));
    other.delete().await;
    elsewhere.ended().await;
}

#[tokio::test]
async fn what_was_not_asked_for_is_not_told() {
    let server = TestServer::start(&[]).await;
    for filter in [json!({}), json!({ "promptsListChanged": true }), json!({ "toolsListChanged": false })] {
        let app = register(&server, &["tools"]).await;
        let mut events = Events::of(listen(&app, "7", filter)).await;
        assert_eq!(events.next().await.unwrap()["params"]["notifications"], json!({}));
        put_tools(&app, &["b"]).await;
        app.delete().await;
        events.ended().await;
    }
}

#[tokio::test]
async fn what_is_not_advertised_does_not_exist() {
    let server = TestServer::start(&[]).await;
    let app = register(&server, &["cancel"]).await;
    let discovered = app.client().modern("server/discover", json!({})).await.json();
    assert_eq!(discovered["result"]["capabilities"], json!({ "tools": {} }));
    assert_eq!(error(&send(listen(&app, "1", json!({}))).await), (404, json!(-32601)));
    // Nor does it for clients of the other era.
    let app = register(&server, &["tools"]).await;
    let reply = app.client().rpc("1", "subscriptions/listen", r#"{"notifications":{}}"#).await;
    assert_eq!(error(&reply), (200, json!(-32601)));
}

#[tokio::test]
async fn a_subscription_that_cannot_be_served_is_refused() {
    let server = TestServer::start(&[]).await;
    let app = register(&server, &["tools"]).await;
    for filter in [json!(null), json!([]), json!("tools"), json!({ "toolsListChanged": 1 })] {
        assert_eq!(error(&send(listen(&app, "1", filter)).await), (200, json!(-32602)));
    }
    let (client, request) = listen(&app, "1", json!({})).build_split();
    let mut request = request.unwrap();
    request.headers_mut().insert("accept", "application/json".parse().unwrap());
    assert_eq!(soon(client.execute(request)).await.unwrap().status(), 406);
    let mut nowhere = app.clone();
    nowhere.mcp_url = format!("{}/v1/mcp", server.base);
    assert_eq!(error(&send(listen(&nowhere, "1", json!({}))).await), (400, json!(400)));
}

#[tokio::test]
async fn a_session_has_as_many_listeners_as_allowed_and_a_gone_one_makes_room() {
    let server = TestServer::start(&[("MAX_LISTENERS_PER_SESSION", "2")]).await;
    let app = register(&server, &["tools"]).await;
    let first = subscribe(&app, "1").await;
    let mut second = subscribe(&app, "2").await;
    let refused = send(listen(&app, "3", json!({}))).await;
    assert_eq!(error(&refused), (429, json!(429)));
    assert!(refused.text.contains("2 clients listen") && refused.header("retry-after").is_some(), "{}", refused.text);
    // Another session has places of its own.
    subscribe(&register(&server, &["tools"]).await, "3").await;
    drop(first);
    until(async || soon(listen(&app, "3", json!({})).send()).await.unwrap().status() == 200).await;
    put_tools(&app, &["b"]).await;
    assert_eq!(second.next().await, Some(list_changed(json!(2))));
}

#[tokio::test]
async fn listening_keeps_no_session_alive() {
    let server = TestServer::start(&[("SESSION_TTL_SECONDS", "0.3"), ("RESUME_GRACE_SECONDS", "0.1")]).await;
    let app = register(&server, &["tools"]).await;
    let events = subscribe(&app, "1").await;
    until(async || app.status().await.status == 404).await;
    events.ended().await;
}

#[tokio::test]
async fn a_quiet_stream_gets_comments() {
    let server = TestServer::start(&[("KEEP_ALIVE_SECONDS", "0.05")]).await;
    let app = register(&server, &["tools"]).await;
    let comments = async {
        let mut events = subscribe(&app, "1").await;
        let mut said = Vec::new();
        // Those that a busy machine sends late come together.
        while said.len() < 3 * 3 {
            said.extend_from_slice(&events.response.chunk().await.unwrap().unwrap());
        }
        assert_eq!(said, b":\n\n".repeat(said.len() / 3));
        events
    };
    let (mut events, took) = timed(soon(comments)).await;
    assert!(took >= Duration::from_millis(150), "{took:?}");
    put_tools(&app, &["b"]).await;
    assert_eq!(events.next().await, Some(list_changed(json!(1))));
}

#[tokio::test]
async fn streams_end_at_shutdown_and_hold_nobody_up() {
    // Whoever waited for the streams would wait this long.
    let server = TestServer::start(&[("DRAIN_SECONDS", "60")]).await;
    let events = subscribe(&register(&server, &["tools"]).await, "1").await;
    server.begin_stop();
    events.ended().await;
    server.stopped().await;
}

const LEGACY_SSE: (&str, &str) = ("LEGACY_SSE", "true");

fn get(url: &str) -> RequestBuilder {
    http().get(url).header("accept", "text/event-stream").header("mcp-protocol-version", "2025-11-25")
}

async fn legacy_capabilities(app: &App) -> Value {
    let reply = app.client().rpc("1", "initialize", r#"{"protocolVersion":"2025-11-25"}"#).await;
    reply.json()["result"]["capabilities"].clone()
}

#[tokio::test]
async fn older_clients_get_no_stream_by_default() {
    let server = TestServer::start(&[]).await;
    let app = register(&server, &["tools"]).await;
    let reply = send(get(&app.mcp_url)).await;
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST")));
    assert_eq!(legacy_capabilities(&app).await, json!({ "tools": {} }));
}

#[tokio::test]
async fn older_clients_get_a_stream_if_the_setting_says_so() {
    let server = TestServer::start(&[LEGACY_SSE, ("KEEP_ALIVE_SECONDS", "0.05")]).await;
    let app = register(&server, &["tools"]).await;
    assert_eq!(legacy_capabilities(&app).await, json!({ "tools": { "listChanged": true } }));
    let by_header = get(&format!("{}/v1/mcp", server.base)).header("mcp-session-id", &app.id);
    for request in [get(&app.mcp_url), http().get(&app.mcp_url), by_header] {
        let mut events = Events::of(request).await;
        // The first comment comes at once, the second when the stream has been quiet.
        for _ in 0..2 {
            assert_eq!(soon(events.response.chunk()).await.unwrap().unwrap(), ":\n\n");
        }
        put_tools(&app, &["b"]).await;
        let changed = json!({ "jsonrpc": "2.0", "method": "notifications/tools/list_changed" });
        assert_eq!(events.next().await, Some(changed.clone()));
        put_tools(&app, &["a"]).await;
        assert_eq!(events.next().await, Some(changed));
    }
    let mut events = Events::of(get(&app.mcp_url)).await;
    app.delete().await;
    assert_eq!(events.next().await, None);
    let gone = send(get(&app.mcp_url)).await;
    assert_eq!(error(&gone), (404, json!(404)));
}

#[tokio::test]
async fn a_get_is_checked_like_a_post() {
    let server =
        TestServer::start(&[LEGACY_SSE, ("OPENCLAW_TOKEN", "0123456789abcdef"), ("MAX_LISTENERS_PER_SESSION", "1")])
            .await;
    let app = register(&server, &["tools"]).await;
    let other = register(&server, &[]).await;
    let authorized = |url: &str| get(url).bearer_auth("0123456789abcdef");
    let refused = send(get(&app.mcp_url)).await;
    assert_eq!((error(&refused), refused.header("www-authenticate")), ((401, json!(401)), Some("Bearer")));
    let status = async |request: RequestBuilder| send(request).await.status;
    assert_eq!(status(authorized(&app.mcp_url).header("origin", "https://evil.example")).await, 403);
    assert_eq!(
        status(http().get(&app.mcp_url).bearer_auth("0123456789abcdef").header("accept", "text/html")).await,
        406
    );
    assert_eq!(status(http().delete(&app.mcp_url).bearer_auth("0123456789abcdef")).await, 405);
    // There is nothing to hear: from an app that never changes its tools, without a session, in 2026-07-28.
    assert_eq!(status(authorized(&other.mcp_url)).await, 405);
    assert_eq!(status(authorized(&format!("{}/v1/mcp", server.base))).await, 405);
    let modern = http().get(&app.mcp_url).bearer_auth("0123456789abcdef").header("mcp-protocol-version", "2026-07-28");
    assert_eq!(status(modern).await, 405);
    let _events = Events::of(authorized(&app.mcp_url)).await;
    let refused = send(authorized(&app.mcp_url)).await;
    assert_eq!(error(&refused), (429, json!(429)));
}

#[tokio::test]
async fn a_page_that_may_is_told_that_it_can_get() {
    let server = TestServer::start(&[LEGACY_SSE]).await;
    let app = register(&server, &["tools"]).await;
    let preflight = http().request(reqwest::Method::OPTIONS, &app.mcp_url).header("origin", "http://localhost:1");
    assert_eq!(send(preflight).await.header("access-control-allow-methods"), Some("GET, POST"));
}

#[tokio::test]
async fn the_streams_of_older_clients_hold_up_no_shutdown_either() {
    let server = TestServer::start(&[LEGACY_SSE, ("DRAIN_SECONDS", "60")]).await;
    let app = register(&server, &["tools"]).await;
    let mut events = Events::of(get(&app.mcp_url)).await;
    server.begin_stop();
    assert_eq!(events.next().await, None);
    server.stopped().await;
}

#[tokio::test]
async fn a_stream_outlives_the_idle_time() {
    let server = TestServer::start(&[("IDLE_SECONDS", "0.2")]).await;
    let app = register(&server, &["tools"]).await;
    let mut events = subscribe(&app, "1").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    put_tools(&app, &["b"]).await;
    assert_eq!(events.next().await, Some(list_changed(json!(1))));
}
