//! The node as its user runs it: a real process between a real MCP server and a real proxy.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinHandle;

use crate::clients::{NODE, clients_dir};
use crate::support::{McpClient, Relay, TestServer, http, send, soon, until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_openclaw-node");

/// `openclaw-node`, running.
pub struct Node {
    child: Child,
    pub stdout: Lines<BufReader<ChildStdout>>,
    log: Arc<Mutex<String>>,
    logging: JoinHandle<()>,
}

impl Node {
    /// Lends what `args` say to the proxy at `base`.
    fn lend(base: &str, args: &[&str]) -> Self {
        Self::lend_as(base, "", args)
    }

    fn lend_as(base: &str, token: &str, args: &[&str]) -> Self {
        let args = [&["lend", "--json", "--device-id", "d", "--proxy-url", base], args].concat();
        Self::start(&args, &[("OPENCLAW_PROXY_APP_TOKEN", token)])
    }

    /// Starts the program with these arguments and variables.
    pub fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(args)
            .env("OPENCLAW_PROXY_LOG", "debug,rmcp=info")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(String::new()));
        let lines = Arc::clone(&log);
        let logging = tokio::spawn(async move {
            while let Ok(Some(line)) = stderr.next_line().await {
                lines.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        Node { child, stdout, log, logging }
    }

    /// The next session that it prints, and a client of it, once the bridge is connected.
    pub async fn session(&mut self) -> (Value, McpClient) {
        let session = self.line().await;
        let client = McpClient::new(session["mcp_url"].as_str().unwrap());
        let url = session["bridge_url"].as_str().unwrap().replace("ws://", "http://").replace("/bridge", "");
        until(async || send(http().get(&url)).await.json()["bridge"]["connected"] == true).await;
        (session, client)
    }

    /// The next line of JSON that it prints.
    pub async fn line(&mut self) -> Value {
        let line = soon(self.stdout.next_line()).await.unwrap();
        let line = line.unwrap_or_else(|| panic!("it printed nothing: {}", self.log()));
        serde_json::from_str(&line).unwrap()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub async fn logged(&self, text: &str) {
        until(async || self.log().contains(text)).await;
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Its exit code and what it logged.
    pub async fn ended(mut self) -> (i32, String) {
        let status = soon(self.child.wait()).await.unwrap();
        soon(self.logging).await.unwrap();
        let log = self.log.lock().unwrap().clone();
        (status.code().unwrap_or_else(|| panic!("{status}")), log)
    }
}

/// A folder of its own for a test, removed with it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("openclaw-node-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    /// What our server was sent, by method.
    fn received(&self, method: &str) -> Vec<Value> {
        let log = std::fs::read_to_string(self.0.join("log")).unwrap_or_default();
        let messages = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        messages.filter(|message| message["method"] == method).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn node() -> String {
    let node = clients_dir().join(NODE);
    assert!(node.exists(), "{} is missing: run tests/run, which installs it", node.display());
    node.to_str().unwrap().to_owned()
}

/// The script of an official server.
fn official(name: &str) -> String {
    let script = clients_dir().join(format!("servers/node_modules/@modelcontextprotocol/server-{name}/dist/index.js"));
    assert!(script.exists(), "{} is missing: run tests/run, which installs it", script.display());
    script.to_str().unwrap().to_owned()
}

/// The script of our own server.
fn ours() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/upstream.mjs").to_str().unwrap().to_owned()
}

/// Our server, lent.
async fn lend_ours(base: &str, folder: &Folder) -> (Node, Value, McpClient) {
    lend_ours_with(base, folder, &[]).await
}

async fn lend_ours_with(base: &str, folder: &Folder, flags: &[&str]) -> (Node, Value, McpClient) {
    let (program, script, place) = (node(), ours(), folder.path(""));
    let args = [flags, &["--", &program, &script, &place]].concat();
    let mut node = Node::lend(base, &args);
    let (session, client) = node.session().await;
    (node, session, client)
}

/// The names of a client's tools.
async fn names(client: &McpClient) -> Vec<String> {
    let reply = client.rpc("1", "tools/list", "{}").await.json();
    let tools = reply["result"]["tools"].as_array().cloned().unwrap_or_default();
    tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_official_everything_server_is_lent_with_images_progress_and_errors() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token")]).await;
    let mut node = Node::lend_as(&server.base, "app-token", &["--", &node(), &official("everything")]);
    let line = soon(node.stdout.next_line()).await.unwrap().unwrap();
    let session: Value = serde_json::from_str(&line).unwrap();
    let client = McpClient::new(session["mcp_url"].as_str().unwrap());

    let list = client.rpc("1", "tools/list", "{}").await.json();
    let tools = list["result"]["tools"].as_array().unwrap();
    let tool = |name: &str| tools.iter().find(|tool| tool["name"] == name).unwrap();
    assert_eq!(tool("echo")["inputSchema"]["required"], json!(["message"]));
    assert_eq!(tool("echo")["annotations"]["readOnlyHint"], true);
    assert_eq!(tool("echo")["title"], "Echo Tool");
    assert_eq!(tool("get-structured-content")["outputSchema"]["type"], "object");
    assert_eq!(session["tools"].as_array().unwrap().len(), tools.len());

    until(async || !client.call("echo", r#"{"message":"x"}"#).await.is_tool_error()).await;
    assert_eq!(client.call("echo", r#"{"message":"h\u00e9"}"#).await.tool_text(), "Echo: hé");
    let image = client.call("get-tiny-image", "{}").await.json();
    let image = &image["result"]["content"][1];
    assert_eq!((&image["type"], &image["mimeType"]), (&json!("image"), &json!("image/png")));
    assert!(image["data"].as_str().unwrap().starts_with("iVBORw0KGgo"));
    let structured = client.call("get-structured-content", r#"{"location":"Chicago"}"#).await.json();
    assert!(structured["result"]["structuredContent"]["temperature"].is_number(), "{structured}");
    let invalid = client.call("get-sum", r#"{"a":"x"}"#).await;
    assert!(invalid.is_tool_error() || invalid.json()["error"]["code"] == -32602, "{}", invalid.text);

    let params = r#"{"name":"trigger-long-running-operation","arguments":{"duration":1,"steps":4},"_meta":{"progressToken":"p"}}"#;
    let stream = client.rpc("7", "tools/call", params).await;
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    let events = stream.text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = events.map(|data| serde_json::from_str(data).unwrap()).collect();
    let (result, progress) = events.split_last().unwrap();
    let progress: Vec<_> = progress.iter().map(|event| event["params"]["progress"].as_f64().unwrap()).collect();
    // rmcp hands reports to tasks of their own, so the last one may miss its call.
    assert!(progress.is_sorted() && progress.last() >= Some(&3.0), "{progress:?}");
    assert!(result["result"]["content"][0]["text"].as_str().unwrap().contains("completed"), "{result}");
}

#[tokio::test]
async fn the_official_filesystem_server_writes_and_reads_files() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let mut node = Node::lend(&server.base, &["--", &node(), &official("filesystem"), &folder.path("")]);
    let (_, client) = node.session().await;
    let file = folder.path("a.txt");
    let write = client.call("write_file", &json!({ "path": file, "content": "line 1\nzwölf" }).to_string()).await;
    assert!(!write.is_tool_error(), "{}", write.text);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "line 1\nzwölf");
    let read = client.call("read_text_file", &json!({ "path": file }).to_string()).await;
    assert_eq!(read.tool_text(), "line 1\nzwölf");
    let outside = client.call("read_text_file", r#"{"path":"/etc/passwd"}"#).await;
    assert!(outside.is_tool_error() && outside.tool_text().contains("denied"), "{}", outside.text);
}

#[tokio::test]
async fn all_pages_are_listed_and_what_a_result_holds_arrives() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, session, client) = lend_ours(&server.base, &folder).await;
    assert_eq!(names(&client).await, ["wait", "die", "grow", "environment", "odd"]);
    assert_eq!(session["tools"].as_array().unwrap().len(), 5);
    let odd = client.call("odd", "{}").await.json();
    let odd = &odd["result"];
    assert_eq!(odd["structuredContent"], json!({ "n": 1e21, "text": "😀" }));
    assert_eq!((&odd["isError"], &odd["_meta"]["a/b"]), (&json!(true), &json!(1)));
    let initialize = r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}"#;
    let initialized = client.rpc("1", "initialize", initialize).await.json();
    assert_eq!(initialized["result"]["instructions"], "Use it gently.");
    assert_eq!(initialized["result"]["serverInfo"]["title"], "upstream");
}

#[tokio::test]
async fn the_trace_of_a_call_reaches_the_lent_server() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours(&server.base, &folder).await;
    let trace =
        json!({ "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1" });
    let params = json!({ "name": "odd", "arguments": {}, "_meta": trace });
    client.rpc("1", "tools/call", &params.to_string()).await;
    let meta = &folder.received("tools/call")[0]["params"]["_meta"];
    assert_eq!((&meta["traceparent"], &meta["tracestate"]), (&trace["traceparent"], &trace["tracestate"]));
}

#[tokio::test]
async fn only_the_tools_that_are_asked_for_are_lent() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let flags = ["--include", "*i*", "--exclude", "die"];
    let (_node, _, client) = lend_ours_with(&server.base, &folder, &flags).await;
    assert_eq!(names(&client).await, ["wait", "environment"]);
}

#[tokio::test]
async fn a_cancelled_call_is_cancelled_at_the_server() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours(&server.base, &folder).await;
    let call = client.spawn_call("7", "wait", r#"{"file":"never"}"#);
    until(async || folder.received("tools/call").len() == 1).await;
    client.post(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}"#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "Tool call was cancelled.");
    until(async || folder.received("notifications/cancelled").len() == 1).await;
    let [cancelled] = &folder.received("notifications/cancelled")[..] else { panic!() };
    assert_eq!(cancelled["params"]["requestId"], folder.received("tools/call")[0]["id"]);
}

#[tokio::test]
async fn a_call_whose_time_is_over_is_cancelled_at_the_server() {
    let server = TestServer::start(&[("TOOL_TIMEOUT_SECONDS", "0.5")]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours(&server.base, &folder).await;
    let late = client.call("wait", r#"{"file":"never"}"#).await;
    assert_eq!(late.tool_text(), "Tool call timed out after 0.5 s.");
    until(async || folder.received("notifications/cancelled").len() == 1).await;
}

#[tokio::test]
async fn more_calls_than_may_run_at_once_are_told_to_retry() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours_with(&server.base, &folder, &["--max-calls", "1"]).await;
    let running = client.spawn_call("1", "wait", r#"{"file":"go"}"#);
    until(async || folder.received("tools/call").len() == 1).await;
    let busy = client.call("environment", r#"{"name":"x"}"#).await;
    assert!(busy.is_tool_error() && busy.tool_text().contains("busy"), "{}", busy.text);
    folder.write("go", "");
    assert_eq!(soon(running).await.unwrap().tool_text(), "waited");
    assert!(!client.call("environment", r#"{"name":"x"}"#).await.is_tool_error());
}

#[tokio::test]
async fn changed_tools_reach_the_client() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours(&server.base, &folder).await;
    client.call("grow", r#"{"name":"leaf"}"#).await;
    until(async || names(&client).await.contains(&"leaf".to_owned())).await;
    assert_eq!(client.call("leaf", "{}").await.tool_text(), "the new tool leaf");
}

#[tokio::test]
async fn a_server_that_dies_is_started_again() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (_node, _, client) = lend_ours(&server.base, &folder).await;
    let died = client.call("die", "{}").await;
    assert!(died.is_tool_error() && died.tool_text().contains("ended before the tool answered"), "{}", died.text);
    until(async || {
        let reply = client.call("environment", r#"{"name":"x"}"#).await;
        assert!(!reply.is_tool_error() || reply.tool_text().contains("does not run"), "{}", reply.text);
        !reply.is_tool_error()
    })
    .await;
}

#[tokio::test]
async fn the_server_does_not_learn_the_app_token() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token")]).await;
    let folder = Folder::new();
    let mut node = Node::lend_as(&server.base, "app-token", &["--", &node(), &ours(), &folder.path("")]);
    let line = soon(node.stdout.next_line()).await.unwrap().unwrap();
    let session: Value = serde_json::from_str(&line).unwrap();
    let client = McpClient::new(session["mcp_url"].as_str().unwrap());
    until(async || client.call("environment", r#"{"name":"PATH"}"#).await.tool_text().contains('/')).await;
    assert_eq!(client.call("environment", r#"{"name":"OPENCLAW_PROXY_APP_TOKEN"}"#).await.tool_text(), "undefined");
}

#[tokio::test]
async fn a_call_outlives_the_bridge_that_carried_it_and_runs_once() {
    let server = TestServer::start(&[]).await;
    let relay = Relay::start(server.port, None).await;
    let folder = Folder::new();
    let (node, session, client) = lend_ours(&format!("http://127.0.0.1:{}", relay.port), &folder).await;
    let client = McpClient::new(&client.url.replace(&relay.port.to_string(), &server.port.to_string()));
    let finished_offline = client.spawn_call("1", "wait", r#"{"file":"one"}"#);
    let finished_later = client.spawn_call("2", "wait", r#"{"file":"two"}"#);
    until(async || folder.received("tools/call").len() == 2).await;
    relay.cut();
    folder.write("one", "");
    assert_eq!(soon(finished_offline).await.unwrap().tool_text(), "waited");
    relay.cut();
    node.logged("trying again").await;
    let status = format!("{}/v1/chat/sessions/{}", server.base, session["mcpSessionId"].as_str().unwrap());
    until(async || send(http().get(&status)).await.json()["bridge"]["epoch"].as_u64() >= Some(3)).await;
    folder.write("two", "");
    assert_eq!(soon(finished_later).await.unwrap().tool_text(), "waited");
    assert_eq!(folder.received("tools/call").len(), 2);
}

#[tokio::test]
async fn calls_over_a_bridge_that_keeps_breaking_run_at_most_once() {
    const CALLS: usize = 200;
    let server = TestServer::start(&[]).await;
    let relay = Relay::start(server.port, None).await;
    let folder = Folder::new();
    folder.write("go", "");
    let flags = ["--max-calls", "1000"];
    let (_node, session, client) = lend_ours_with(&format!("http://127.0.0.1:{}", relay.port), &folder, &flags).await;
    let client = McpClient::new(&client.url.replace(&relay.port.to_string(), &server.port.to_string()));
    let status = format!("{}/v1/chat/sessions/{}", server.base, session["mcpSessionId"].as_str().unwrap());
    let mut calls = Vec::new();
    for n in 0..CALLS {
        calls.push(client.spawn_call("1", "wait", &json!({ "file": "go", "n": n }).to_string()));
        if n % 50 == 25 {
            // In the middle of whatever is under way.
            relay.cut();
        }
        tokio::task::yield_now().await;
    }
    let mut answered = 0;
    for call in calls {
        let reply = soon(call).await.unwrap();
        if reply.is_tool_error() {
            assert!(reply.tool_text().contains("Bridge"), "{}", reply.text);
        } else {
            answered += 1;
        }
    }
    until(async || send(http().get(&status)).await.json()["calls_in_flight"] == 0).await;
    let mut ran: Vec<u64> =
        folder.received("tools/call").iter().map(|call| call["params"]["arguments"]["n"].as_u64().unwrap()).collect();
    ran.sort_unstable();
    assert!(ran.windows(2).all(|pair| pair[0] < pair[1]), "something ran twice: {ran:?}");
    assert!(answered > CALLS * 3 / 4, "{answered} answered");
}

#[tokio::test]
async fn when_the_proxy_restarts_the_tools_are_registered_again() {
    let server = TestServer::start(&[]).await;
    let port = server.port;
    let folder = Folder::new();
    let (mut node, first, _) = lend_ours(&server.base, &folder).await;
    server.stopped().await;
    // It waits as long as the proxy asks it to.
    node.logged("retry_ms=500; trying again").await;
    assert!(node.log().contains("pause_ms=500"), "{}", node.log());
    let _server = TestServer::start_on(port, &[]).await;
    let (second, client) = node.session().await;
    assert_ne!(first["mcpSessionId"], second["mcpSessionId"]);
    assert_eq!(client.call("environment", r#"{"name":"x"}"#).await.tool_text(), "undefined");
}

#[tokio::test]
async fn a_proxy_that_is_not_there_yet_is_waited_for() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let folder = Folder::new();
    let mut node = Node::lend(&format!("http://127.0.0.1:{port}"), &["--", &node(), &ours(), &folder.path("")]);
    node.logged("cannot be reached").await;
    let _server = TestServer::start_on(port, &[]).await;
    node.session().await;
}

#[tokio::test]
async fn a_wrong_token_ends_it_with_a_sentence() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token")]).await;
    let folder = Folder::new();
    for token in ["", "canary"] {
        let node = Node::lend_as(&server.base, token, &["--", &node(), &ours(), &folder.path("")]);
        let (code, log) = node.ended().await;
        assert_eq!(code, 78, "{log}");
        assert!(log.contains("OPENCLAW_PROXY_APP_TOKEN"), "{log}");
        assert!(!log.contains("canary"), "{log}");
    }
}

#[tokio::test]
async fn what_cannot_be_lent_ends_it_with_a_sentence() {
    let server = TestServer::start(&[]).await;
    for (args, code, sentence) in [
        (&["--", "/no/such/program"][..], 1, "cannot be run"),
        (&["--", "false"], 1, "The MCP server 'false' cannot be used"),
        (&["--mcp-url", "http://127.0.0.1:9/"], 1, "The MCP server at 127.0.0.1:9 cannot be used"),
        (&[], 2, "--mcp-url"),
    ] {
        let (ended, log) = Node::lend(&server.base, args).ended().await;
        assert!(ended == code && log.contains(sentence), "{args:?}: {ended} {log}");
    }
}

#[tokio::test]
async fn a_stopped_node_takes_its_session_and_its_server_along() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let (program, script) = (node(), ours());
    // A wrapper that starts the server, as npx does.
    let command = format!(
        "exec 3<&0; '{program}' '{script}' '{}' <&3 & echo $! > '{}'; wait",
        folder.path(""),
        folder.path("pid")
    );
    let mut node = Node::lend(&server.base, &["--", "sh", "-c", &command]);
    let (session, client) = node.session().await;
    let status = format!("{}/v1/chat/sessions/{}", server.base, session["mcpSessionId"].as_str().unwrap());
    let running = client.spawn_call("1", "wait", r#"{"file":"never"}"#);
    until(async || folder.received("tools/call").len() == 1).await;
    node.signal("-TERM");
    let (code, log) = node.ended().await;
    assert_eq!(code, 0, "{log}");
    assert_eq!(send(http().get(&status)).await.status, 404);
    assert!(soon(running).await.unwrap().is_tool_error());
    let pid = std::fs::read_to_string(folder.0.join("pid")).unwrap();
    until(async || !Path::new("/proc").join(pid.trim()).exists()).await;
}

/// Our server over HTTP: a process, and where it is.
async fn serve_ours(folder: &Folder, port: u16) -> (Child, u16) {
    let mut child = Command::new(node())
        .args([&ours(), &folder.path(""), &port.to_string()])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = soon(lines.next_line()).await.unwrap().unwrap().parse().unwrap();
    (child, port)
}

#[tokio::test]
async fn a_server_with_a_url_is_lent_and_a_new_token_is_read() {
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    folder.write("token", "one");
    folder.write("ours", "\u{feff}one\r\n");
    let (mut upstream, port) = serve_ours(&folder, 0).await;
    let url = format!("http://127.0.0.1:{port}/");
    let mut node = Node::lend(&server.base, &["--mcp-url", &url, "--mcp-token-file", &folder.path("ours")]);
    let (_, client) = node.session().await;
    let answer = async || client.call("environment", r#"{"name":"x"}"#).await.tool_text();
    assert_eq!(answer().await, "undefined");
    folder.write("token", "two");
    assert!(answer().await.contains("refuses the token"), "{}", answer().await);
    folder.write("ours", "two\n");
    assert_eq!(answer().await, "undefined");
    // The server goes and comes back.
    upstream.kill().await.unwrap();
    let gone = answer().await;
    assert!(gone.contains("did not answer: it cannot be reached"), "{gone}");
    let (_upstream, _) = serve_ours(&folder, port).await;
    until(async || answer().await == "undefined").await;
}

#[tokio::test]
async fn the_official_everything_server_is_lent_by_its_url_even_if_it_forgets_us() {
    let server = TestServer::start(&[]).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let start = || {
        let mut command = Command::new(node());
        command.args([&official("everything"), "streamableHttp"]).env("PORT", port.to_string());
        command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap()
    };
    let mut upstream = start();
    until(async || TcpStream::connect(("127.0.0.1", port)).await.is_ok()).await;
    let mut node = Node::lend(&server.base, &["--mcp-url", &format!("http://127.0.0.1:{port}/mcp")]);
    let (_, client) = node.session().await;
    let echo = async || client.call("echo", r#"{"message":"x"}"#).await;
    assert_eq!(echo().await.tool_text(), "Echo: x");
    let params = r#"{"name":"trigger-long-running-operation","arguments":{"duration":1,"steps":2},"_meta":{"progressToken":"p"}}"#;
    let stream = client.rpc("7", "tools/call", params).await;
    assert!(stream.text.contains("notifications/progress") && stream.text.contains("completed"), "{}", stream.text);
    upstream.kill().await.unwrap();
    let _upstream = start();
    tokio::time::timeout(Duration::from_secs(60), async {
        while echo().await.is_tool_error() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("{}", node.log()));
}
