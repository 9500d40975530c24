//! The node's local MCP server, over real sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use openclaw_mcp_proxy::auth::Token;
use openclaw_mcp_proxy::node::capabilities::{Args, Capability, Exposure, Image, Registry, Request, Response};
use openclaw_mcp_proxy::node::local_mcp::{Config, Server};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{McpClient, Reply, http, send, soon, timed, until};

/// Counts what happened to its commands.
#[derive(Default)]
struct Counts {
    started: AtomicUsize,
    cancelled: AtomicUsize,
}

struct TestCapability {
    category: &'static str,
    commands: Vec<&'static str>,
    counts: Arc<Counts>,
}

impl Capability for TestCapability {
    fn category(&self) -> &str {
        self.category
    }

    fn commands(&self) -> Vec<&str> {
        self.commands.clone()
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        self.counts.started.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            let Request { command, args, session_key } = request;
            assert_eq!(session_key, None);
            match &*command {
                "test.echo" if args == Args::default() => Response::done(json!("no arguments")),
                "test.echo" => Response::done(json!({ "echoed": args.get("text"), "list": args.strings("list") })),
                "test.fail" => Response::failed("kaboom"),
                "test.mute" => Response::failed(""),
                "test.nothing" => Response::done(Value::Null),
                "test.exit" => Response::done(json!({ "success": false, "exitCode": 42 })),
                "test.crash" => panic!("canary-secret"),
                "test.image" => Response::Done {
                    payload: json!({ "format": "png", "base64": "aGk=" }),
                    images: vec![Image { mime_type: "image/png".into(), base64: "aGk=".into() }],
                },
                "test.slow" => {
                    cancel.cancelled().await;
                    self.counts.cancelled.fetch_add(1, Ordering::SeqCst);
                    Response::failed("cancelled")
                }
                "test.stuck" => std::future::pending().await,
                _ => Response::unknown_command(&command),
            }
        })
    }
}

const COMMANDS: [&str; 10] = [
    "test.echo",
    "test.fail",
    "test.mute",
    "test.nothing",
    "test.exit",
    "test.crash",
    "test.image",
    "test.slow",
    "test.stuck",
    "test.unknown",
];

/// A local server with a capability for tests.
pub struct Local {
    pub url: String,
    pub port: u16,
    server: Server,
    pub registry: Arc<Registry>,
    counts: Arc<Counts>,
    shutdown: CancellationToken,
    running: Option<JoinHandle<()>>,
}

impl Local {
    pub async fn start() -> Self {
        Self::start_with(Config::default()).await
    }

    pub async fn start_with(config: Config) -> Self {
        let registry = Arc::new(Registry::new());
        let counts = Arc::<Counts>::default();
        let capability = TestCapability { category: "test", commands: COMMANDS.to_vec(), counts: Arc::clone(&counts) };
        registry.add(capability, Exposure::Everywhere);
        let server = Server::new(config, Arc::clone(&registry));
        let listener = Server::bind(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn({
            let (server, shutdown) = (server.clone(), shutdown.clone());
            async move { server.listen(listener, shutdown).await }
        });
        let url = format!("http://127.0.0.1:{port}/");
        Local { url, port, server, registry, counts, shutdown, running: Some(running) }
    }

    fn client(&self) -> McpClient {
        McpClient::new(&self.url)
    }

    async fn post(&self, body: &str) -> Reply {
        self.client().post(body).await
    }

    /// A request's `result`.
    async fn result(&self, method: &str, params: &str) -> Value {
        let reply = self.client().rpc("1", method, params).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let answer = reply.json();
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].clone()
    }

    /// How many calls were cancelled.
    pub fn cancelled(&self) -> usize {
        self.counts.cancelled.load(Ordering::SeqCst)
    }

    async fn started(&self, calls: usize) {
        until(async || self.counts.started.load(Ordering::SeqCst) == calls).await;
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// The text of a failed call's result.
fn failure(reply: &Reply) -> String {
    assert!(reply.status == 200 && reply.is_tool_error(), "{}", reply.text);
    reply.tool_text()
}

#[tokio::test]
async fn the_handshake_negotiates_the_version() {
    let config = Config { name: "my-node".into(), version: "1.2.3".into(), ..Config::default() };
    let local = Local::start_with(config).await;
    for (offered, agreed) in [
        (r#"{"protocolVersion":"2025-11-25"}"#, "2025-11-25"),
        (r#"{"protocolVersion":"2025-03-26"}"#, "2025-03-26"),
        (r#"{"protocolVersion":"2024-11-05"}"#, "2024-11-05"),
        (r#"{"protocolVersion":"2026-07-28"}"#, "2024-11-05"),
        (r#"{"protocolVersion":7}"#, "2024-11-05"),
        ("null", "2024-11-05"),
        ("[1]", "2024-11-05"),
    ] {
        let result = local.result("initialize", offered).await;
        let expected = json!({ "protocolVersion": agreed, "capabilities": { "tools": { "listChanged": false } },
            "serverInfo": { "name": "my-node", "version": "1.2.3" } });
        assert_eq!(result, expected, "{offered}");
    }
    assert_eq!(local.result("ping", "{}").await, json!({}));
    assert_eq!(local.result("resources/list", "{}").await, json!({ "resources": [] }));
    assert_eq!(local.result("prompts/list", "{}").await, json!({ "prompts": [] }));
}

#[tokio::test]
async fn a_capability_that_is_added_later_is_in_the_next_list() {
    let local = Local::start().await;
    let names = async || {
        let tools = local.result("tools/list", r#"{"cursor":"any"}"#).await["tools"].clone();
        tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names().await, COMMANDS);
    let counts = Arc::default();
    local
        .registry
        .add(TestCapability { category: "custom", commands: vec!["custom.unknown"], counts }, Exposure::LocalOnly);
    assert_eq!(names().await, [&COMMANDS[..], &["custom.unknown"]].concat());
    let tools = local.result("tools/list", "null").await["tools"].clone();
    let expected = json!({ "name": "custom.unknown", "description": "custom capability: custom.unknown",
        "inputSchema": { "type": "object", "additionalProperties": true, "properties": {} } });
    assert_eq!(tools.as_array().unwrap().last(), Some(&expected));
}

#[tokio::test]
async fn a_call_gives_its_payload_as_json_text() {
    let local = Local::start().await;
    let client = local.client();
    let reply = client.call("test.echo", r#"{"text":"h\u00e9 <&>","list":[" a ",3,""]}"#).await;
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")));
    let result = reply.json()["result"].clone();
    assert_eq!(result["isError"], false);
    let payload: Value = serde_json::from_str(&reply.tool_text()).unwrap();
    assert_eq!(payload, json!({ "echoed": "h\u{e9} <&>", "list": ["a"] }));
    assert_eq!(result["content"].as_array().unwrap().len(), 1);

    let text = |body: Value| body["content"][0]["text"].as_str().unwrap().to_owned();
    for params in [r#"{"name":"test.echo"}"#, r#"{"name":"test.echo","arguments":null}"#] {
        assert_eq!(text(local.result("tools/call", params).await), "\"no arguments\"");
    }
    assert_eq!(text(local.result("tools/call", r#"{"name":"test.nothing"}"#).await), "null");
    let exit = local.result("tools/call", r#"{"name":"test.exit"}"#).await;
    assert_eq!((exit["isError"].as_bool(), text(exit)), (Some(false), r#"{"exitCode":42,"success":false}"#.into()));
    let image = local.result("tools/call", r#"{"name":"test.image"}"#).await;
    let item = json!({ "type": "image", "data": "aGk=", "mimeType": "image/png" });
    assert_eq!((&image["content"][1], text(image.clone())), (&item, r#"{"base64":"aGk=","format":"png"}"#.into()));
}

#[tokio::test]
async fn whatever_is_wrong_with_a_call_is_a_result_to_read() {
    let local = Local::start().await;
    for (params, says) in [
        ("null", "Invalid params: expected object"),
        ("[1]", "Invalid params: expected object"),
        ("\"x\"", "Invalid params: expected object"),
        ("{}", "Missing 'name'"),
        (r#"{"name":42}"#, "Missing 'name'"),
        (r#"{"name":" "}"#, "Empty tool name"),
        (r#"{"name":"test.echo","arguments":[1,2,3]}"#, "'arguments' must be a JSON object if present"),
        (r#"{"name":"test.echo","arguments":"x"}"#, "'arguments' must be a JSON object if present"),
        (r#"{"name":"Test.Echo"}"#, "Unknown tool: Test.Echo"),
        (r#"{"name":"test.unknown"}"#, "Unknown command: test.unknown"),
        (r#"{"name":"test.fail"}"#, "kaboom"),
        (r#"{"name":"test.mute"}"#, "tool execution failed"),
    ] {
        let result = local.result("tools/call", params).await;
        let expected = json!({ "content": [{ "type": "text", "text": says }], "isError": true });
        assert_eq!(result, expected, "{params}");
    }
    let reply = local.post(r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#).await;
    assert_eq!(failure(&reply), "Invalid params: expected object");
    let crash = local.client().call("test.crash", "{}").await;
    assert_eq!(crash.json()["error"], json!({ "code": -32603, "message": "internal error" }));
}

#[tokio::test]
async fn envelopes_are_read_leniently_and_ids_come_back_as_sent() {
    let local = Local::start().await;
    for (body, answer) in [
        ("[1,2,3]", r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Request must be a JSON object"}}"#),
        (r#"{"id":7}"#, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32600,"message":"Missing 'method'"}}"#),
        (r#"{"id":7,"method":1}"#, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32600,"message":"Missing 'method'"}}"#),
        (
            r#"{"id":"\u0041","method":"x/y"}"#,
            r#"{"jsonrpc":"2.0","id":"\u0041","error":{"code":-32601,"message":"Method not found: x/y"}}"#,
        ),
        (
            r#"{"id":1,"method":"Ping"}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"Method not found: Ping"}}"#,
        ),
        (
            r#"{"id":1,"method":"server/discover"}"#,
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"Method not found: server/discover"}}"#,
        ),
        (r#"{"jsonrpc":"9","id":1.5,"method":"ping","extra":[]}"#, r#"{"jsonrpc":"2.0","id":1.5,"result":{}}"#),
        (r#"{"id":1,"id":1.0e2,"method":"x","method":"ping"}"#, r#"{"jsonrpc":"2.0","id":1.0e2,"result":{}}"#),
        (
            r#"{"id":99999999999999999999,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","id":99999999999999999999,"result":{}}"#,
        ),
        (r#"{"id":true,"method":"ping"}"#, r#"{"jsonrpc":"2.0","id":null,"result":{}}"#),
        (r#"{"id":{"a":1},"method":"ping"}"#, r#"{"jsonrpc":"2.0","id":null,"result":{}}"#),
    ] {
        let reply = local.post(body).await;
        assert_eq!((reply.status, &*reply.text), (200, answer), "{body}");
    }
    for body in ["", "not json", "\u{feff}{}", r#"{"id":1,}"#] {
        let answer = local.post(body).await.json();
        assert_eq!((answer["id"].is_null(), &answer["error"]["code"]), (true, &json!(-32700)), "{body}");
        assert!(answer["error"]["message"].as_str().unwrap().starts_with("Parse error: "));
    }
}

#[tokio::test]
async fn a_message_without_an_id_is_carried_out_and_never_answered() {
    let local = Local::start().await;
    for body in [
        r#"{"method":"notifications/initialized"}"#,
        r#"{"id":null,"method":"tools/call","params":{"name":"test.echo"}}"#,
        r#"{"method":"tools/call","params":{"name":"test.crash"}}"#,
        r#"{"method":"no/such"}"#,
        "{}",
        r#"{"method":"notifications/cancelled","params":{"requestId":"unknown"}}"#,
        r#"{"method":"notifications/cancelled","params":{"requestId":null}}"#,
        r#"{"method":"notifications/cancelled","params":[]}"#,
        r#"{"method":"notifications/cancelled"}"#,
    ] {
        let reply = local.post(body).await;
        assert_eq!((reply.status, &*reply.text, reply.header("content-type")), (204, "", None), "{body}");
    }
    assert_eq!(local.counts.started.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_cancelled_call_says_so_and_what_it_started_ends() {
    let local = Local::start().await;
    let client = local.client();
    let cancel = async |id: &str| {
        let body = format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
        assert_eq!(local.post(&body).await.status, 204);
    };
    let call = client.spawn_call("\"slow-1\"", "test.slow", "{}");
    local.started(1).await;
    cancel("\"slow-1\"").await;
    assert_eq!(failure(&soon(call).await.unwrap()), "cancelled");
    until(async || local.cancelled() == 1).await;

    // Before its call: the call never starts.
    cancel("\"early\"").await;
    assert_eq!(failure(&client.call_as("\"early\"", "test.slow", "{}").await), "cancelled");
    assert_eq!(local.counts.started.load(Ordering::SeqCst), 1);

    // A string is no number; numbers are compared by value.
    let call = client.spawn_call("4.2e1", "test.stuck", "{}");
    local.started(2).await;
    cancel("\"42\"").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!call.is_finished());
    cancel("42").await;
    assert_eq!(failure(&soon(call).await.unwrap()), "cancelled");

    // Two clients with one id: nobody's call is cancelled.
    let (first, second) = (client.spawn_call("1", "test.slow", "{}"), client.spawn_call("1", "test.slow", "{}"));
    local.started(4).await;
    cancel("1").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!first.is_finished() && !second.is_finished());
    first.abort();
    second.abort();
    // Their connections have gone, so both are ended.
    until(async || local.cancelled() == 3).await;
}

#[tokio::test]
async fn a_request_has_its_time_and_no_more() {
    let local = Local::start_with(Config { deadline: Duration::from_millis(100), ..Config::default() }).await;
    for tool in ["test.slow", "test.stuck"] {
        let (reply, took) = timed(local.client().call(tool, "{}")).await;
        assert_eq!(failure(&reply), "request timed out", "{tool}");
        assert!(took >= Duration::from_millis(100), "{took:?}");
    }
    let head = format!(
        "POST / HTTP/1.1\r\nHost: localhost:{}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{",
        local.port
    );
    let mut stream = TcpStream::connect(("127.0.0.1", local.port)).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    soon(stream.read_exact(&mut answer)).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
}

#[tokio::test]
async fn the_gates_stand_in_their_order() {
    let local = Local::start_with(Config { token: Token::new("secret"), ..Config::default() }).await;
    let get = || http().get(&local.url);
    let good = || get().bearer_auth("secret");
    let probe = send(good()).await;
    assert_eq!((probe.status, probe.header("content-type")), (200, Some("text/plain")));
    assert!(probe.text.starts_with("OpenClaw MCP server"), "{}", probe.text);
    let verb = |name: &str| http().request(name.parse().unwrap(), &local.url);
    for (request, status, says) in [
        (good().header("origin", "null"), 403, "origin not allowed"),
        (good().header("origin", local.url.trim_end_matches('/')), 403, "origin not allowed"),
        (good().header("origin", "https://evil.example").header("host", "evil.example"), 403, "origin not allowed"),
        (good().header("referer", "https://evil.example/"), 403, "browser context not allowed"),
        (get().header("host", "evil.example"), 403, "host not allowed"),
        (good().header("host", "127.0.0.1.evil.example"), 403, "host not allowed"),
        (good().header("host", "[::2]"), 403, "host not allowed"),
        (get(), 401, "missing or invalid bearer token"),
        (get().bearer_auth("secre"), 401, "missing or invalid bearer token"),
        (verb("PUT"), 401, "missing or invalid bearer token"),
        (verb("OPTIONS"), 401, "missing or invalid bearer token"),
        (verb("PUT").bearer_auth("secret"), 405, "POST only"),
        (verb("DELETE").bearer_auth("secret"), 405, "POST only"),
        (verb("OPTIONS").bearer_auth("secret"), 405, "POST only"),
        (verb("post").bearer_auth("secret"), 405, "POST only"),
        (verb("POST").bearer_auth("secret").body("{}"), 415, "application/json required"),
        (
            verb("POST").bearer_auth("secret").header("content-type", "text/plain").body("{}"),
            415,
            "application/json required",
        ),
        (verb("POST").header("content-type", "text/plain").body("{}"), 401, "missing or invalid bearer token"),
    ] {
        let reply = send(request).await;
        assert_eq!((reply.status, &*reply.text), (status, says));
        assert_eq!(reply.header("content-type"), Some("text/plain"));
        assert!(
            !reply.headers.keys().any(|name| name.as_str().starts_with("access-control") || name == "www-authenticate")
        );
    }
    assert_eq!(send(verb("HEAD").bearer_auth("secret")).await.status, 405);
    for request in [
        good().header("host", "localhost"),
        good().header("host", "LOCALHOST:1"),
        good().header("host", "[::1]:9"),
        good().header("origin", ""),
        good().header("sec-fetch-site", "cross-site").header("sec-fetch-mode", "cors"),
        get().header("authorization", "bearer   secret "),
    ] {
        assert_eq!(send(request).await.status, 200);
    }
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for content_type in ["application/json", "Application/JSON; charset=utf-8", " application/json ;x"] {
        let request = http().post(format!("{}x/y?z", local.url)).header("content-type", content_type);
        assert_eq!(send(request.bearer_auth("secret").body(ping)).await.status, 200, "{content_type}");
    }
    local.server.set_token(&Token::new("another"));
    assert_eq!(send(good()).await.status, 401);
    assert_eq!(send(get().bearer_auth("another")).await.status, 200);
}

#[tokio::test]
async fn a_body_of_four_mebibytes_passes_and_one_byte_more_does_not() {
    let local = Local::start().await;
    let limit = Config::default().max_body_bytes;
    let body = |len: usize| {
        let start = r#"{"jsonrpc":"2.0","id":1,"method":"ping","x":""#;
        format!("{start}{}\"}}", "x".repeat(len - start.len() - 2))
    };
    assert_eq!(local.post(&body(limit)).await.status, 200);
    for reply in [
        local.post(&body(limit + 1)).await,
        local.post(&body(limit + 1024 * 1024)).await,
        send(local.client().request("").body(reqwest::Body::wrap_stream(futures_util::stream::iter([Ok::<
            _,
            std::io::Error,
        >(
            body(limit + 1),
        )]))))
        .await,
    ] {
        assert_eq!((reply.status, &*reply.text), (413, "request body too large"));
    }
    // A body that breaks off harms nobody.
    let broken = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{";
    TcpStream::connect(("127.0.0.1", local.port)).await.unwrap().write_all(broken.as_bytes()).await.unwrap();
    assert_eq!(local.result("ping", "{}").await, json!({}));
}

#[tokio::test]
async fn more_requests_than_places_are_refused_after_a_moment() {
    let local = Local::start_with(Config { max_requests: 1, ..Config::default() }).await;
    let call = local.client().spawn_call("1", "test.slow", "{}");
    local.started(1).await;
    let (busy, took) = timed(send(http().get(&local.url).header("origin", "x"))).await;
    assert_eq!((busy.status, &*busy.text), (503, "server busy"));
    assert!(took >= Duration::from_millis(50), "{took:?}");
    call.abort();
    until(async || send(http().get(&local.url)).await.status == 200).await;

    let local = Local::start().await;
    let calls: Vec<_> = (0..8).map(|id: u8| local.client().spawn_call(&id.to_string(), "test.slow", "{}")).collect();
    local.started(8).await;
    assert_eq!(send(http().get(&local.url)).await.status, 503);
    calls.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn shutdown_ends_what_is_in_flight() {
    let mut local =
        Local::start_with(Config { max_requests: 1, admission: Duration::from_secs(60), ..Config::default() }).await;
    let call = local.client().spawn_call("1", "test.slow", "{}");
    local.started(1).await;
    let waiting = tokio::spawn(http().get(&local.url).send());
    tokio::time::sleep(Duration::from_millis(50)).await;
    local.shutdown.cancel();
    assert_eq!(failure(&soon(call).await.unwrap()), "request timed out");
    let waited = soon(waiting).await.unwrap();
    assert!(waited.is_err(), "a request that waits for a place is dropped: {waited:?}");
    soon(local.running.take().unwrap()).await.unwrap();
    assert!(TcpStream::connect(("127.0.0.1", local.port)).await.is_err());
    assert_eq!(local.cancelled(), 1);
}

#[tokio::test]
async fn clients_of_2026_are_served_by_their_own_rules() {
    let local = Local::start().await;
    let client = local.client();
    let discovered = client.modern("server/discover", json!({})).await.json()["result"].clone();
    assert_eq!(discovered["supportedVersions"].as_array().unwrap().last(), Some(&json!("2026-07-28")));
    assert_eq!(discovered["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "openclaw-node");
    let listed = client.modern("tools/list", json!({})).await.json()["result"].clone();
    assert_eq!(
        (listed["tools"].as_array().unwrap().len(), &listed["resultType"]),
        (COMMANDS.len(), &json!("complete"))
    );
    let called = client.modern("tools/call", json!({ "name": "test.echo", "arguments": { "text": "x" } })).await;
    assert_eq!(called.tool_text(), r#"{"echoed":"x","list":[]}"#);
    let failed = client.modern("tools/call", json!({ "name": "test.fail" })).await;
    assert_eq!((failed.is_tool_error(), failed.tool_text()), (true, "kaboom".to_owned()));
    let crashed = client.modern("tools/call", json!({ "name": "test.crash" })).await;
    assert_eq!(crashed.json()["error"]["message"], "internal error");
    let unknown = client.modern("tools/call", json!({ "name": "no.such" })).await;
    assert_eq!(unknown.json()["error"]["code"], -32602);
    // Its calls are cancelled by closing the connection.
    let call = tokio::spawn(client.modern_request("9", "tools/call", json!({ "name": "test.slow" }), json!({})).send());
    local.started(4).await;
    call.abort();
    until(async || local.cancelled() == 1).await;
}

#[tokio::test]
async fn who_says_nothing_holds_no_place_for_long() {
    let short = Duration::from_millis(300);
    let local = Local::start_with(Config { head_timeout: short, body_pause: short, ..Config::default() }).await;
    let connect = async || TcpStream::connect(("127.0.0.1", local.port)).await.unwrap();
    let mut silent = connect().await;
    let mut answer = Vec::new();
    let (_, took) = timed(soon(silent.read_to_end(&mut answer))).await;
    assert!(took >= short, "{took:?}");
    // A body that pauses for less arrives, one that pauses for longer does not.
    let head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 40\r\n\r\n";
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    assert_eq!(body.len(), 40);
    for (pause, status) in [(Some(Duration::from_millis(50)), "200"), (None, "408")] {
        let mut stream = connect().await;
        stream.write_all(format!("{head}{}", &body[..20]).as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
            stream.write_all(&body.as_bytes()[20..]).await.unwrap();
        }
        soon(stream.read_to_end(&mut answer)).await.unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
}
