//! `openclaw-node serve` as its user runs it: the real program, curl, `winnode`, and a real proxy.

use std::process::Stdio;

use openclaw_mcp_proxy::node::serve::ServeArgs;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::node::{Folder, Node};
use crate::support::{McpClient, TestServer, soon, until};
use crate::winnode::winnode;

/// A node with a folder of its own.
pub struct Serving {
    pub node: Node,
    pub folder: Folder,
    /// The local MCP server's URL; empty if there is none.
    pub url: String,
}

impl Serving {
    /// Starts a node whose local MCP server takes any port.
    pub async fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_in(Folder::new(), args, env).await
    }

    pub async fn start_in(folder: Folder, args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut node = spawn(&folder, args, env);
        let line = node.line().await;
        let url = line["local_mcp_url"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned();
        assert_eq!(line["token_file"], folder.path("mcp-token.txt"));
        Serving { node, folder, url }
    }

    fn port(&self) -> &str {
        self.url.trim_end_matches('/').rsplit(':').next().unwrap()
    }

    pub fn token(&self) -> String {
        std::fs::read_to_string(self.folder.path("mcp-token.txt")).unwrap()
    }

    /// Runs `winnode`, which must find the node by itself.
    pub async fn winnode(&self, args: &[&str]) -> Value {
        let folder = self.folder.path("");
        let ran = winnode(&[("OPENCLAW_MCP_PORT", self.port()), ("OPENCLAW_TRAY_DATA_DIR", &folder)], args).await;
        assert_eq!((ran.code, &*ran.stderr), (0, ""), "{ran:?}");
        serde_json::from_str(&ran.stdout).unwrap()
    }

    /// Status and body of a request that curl makes.
    async fn curl(&self, args: &[&str]) -> (u16, String) {
        let mut command = Command::new("curl");
        command.args(["-s", "-m", "10", "-w", "\n%{http_code}", &self.url]).args(args).stdin(Stdio::null());
        let output = soon(command.output()).await.expect("curl is missing; install it with: apt-get install curl");
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, status) = text.rsplit_once('\n').unwrap();
        (status.parse().unwrap(), body.to_owned())
    }
}

fn spawn(folder: &Folder, args: &[&str], env: &[(&str, &str)]) -> Node {
    let path = folder.path("");
    let args = [&["serve", "--json"], args].concat();
    Node::start(&args, &[&[("OPENCLAW_TRAY_DATA_DIR", &*path), ("OPENCLAW_MCP_PORT", "0")], env].concat())
}

pub async fn node(folder: &Folder, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_openclaw-node"));
    command.args(args).env("OPENCLAW_TRAY_DATA_DIR", folder.path("")).stdin(Stdio::null());
    let output = soon(command.output()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn the_gate_holds_against_curl() {
    let serving = Serving::start(&[], &[]).await;
    let bearer = format!("Authorization: Bearer {}", serving.token());
    let json = "Content-Type: application/json";
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let expected = [
        (403, vec!["-X", "POST", "-H", "Origin: https://evil.com", "-H", json, "-d", "{}"]),
        (403, vec!["-X", "POST", "-H", "Host: evil.com", "-H", json, "-d", "{}"]),
        (401, vec!["-H", json, "-d", ping]),
        (401, vec!["-H", json, "-H", "Authorization: Bearer wrong", "-d", ping]),
        (401, vec![]),
        (415, vec!["-H", &bearer, "-H", "Content-Type: text/plain", "--data", ping]),
        (405, vec!["-X", "PUT", "-H", &bearer]),
    ];
    for (status, args) in expected {
        assert_eq!(serving.curl(&args).await.0, status, "{args:?}");
    }
    let (status, probe) = serving.curl(&["-H", &bearer]).await;
    assert!(status == 200 && probe.starts_with("OpenClaw MCP server"), "{status} {probe}");
    let (status, answer) = serving.curl(&["-H", &bearer, "-H", json, "-d", ping]).await;
    assert_eq!((status, &*answer), (200, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#));
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let (_, listed) = serving.curl(&["-H", &bearer, "-H", json, "-d", list]).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["result"], serving.winnode(&["--list-tools"]).await);
}

#[tokio::test]
async fn a_token_that_is_reset_fails_from_the_next_request_on() {
    let serving = Serving::start(&[], &[]).await;
    let old = serving.token();
    let get = async |token: &str| serving.curl(&["-H", &format!("Authorization: Bearer {token}")]).await.0;
    assert_eq!(get(&old).await, 200);
    let (code, new, _) = node(&serving.folder, &["token", "reset"]).await;
    assert_eq!((code, get(&old).await, get(new.trim()).await), (0, 401, 200));
    assert_eq!(node(&serving.folder, &["token", "show"]).await.1, new);
    let path = node(&serving.folder, &["token", "path"]).await.1;
    assert_eq!(path.trim(), serving.folder.path("mcp-token.txt"));
    assert!(serving.winnode(&["--command", "device.info"]).await["deviceName"].is_string());
}

#[tokio::test]
async fn the_bridge_lends_the_harmless_tools_and_what_is_named() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token")]).await;
    let args = ["--proxy-url", &*server.base, "--lend", "browser.*", "--withhold", "device.info"];
    let mut serving = Serving::start(&args, &[("OPENCLAW_PROXY_APP_TOKEN", "app-token")]).await;
    let session = serving.node.line().await;
    serving.node.logged("bridge connected").await;
    let client = McpClient::new(session["mcp_url"].as_str().unwrap());
    let tools: Vec<&str> = session["tools"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(tools.contains(&"device.status") && tools.contains(&"system.which"), "{tools:?}");
    let is_home = |tool: &&str| tool.starts_with("app.") || tool.starts_with("system.run") || *tool == "device.info";
    assert!(!tools.iter().any(is_home), "{tools:?}");
    for (tool, says) in [("app.status", "app.status"), ("device.info", "device.info"), ("system.run", "system.run")] {
        // Named or not, it is not among the session's tools.
        let refused = client.call(tool, "{}").await;
        assert!(refused.text.contains(says) && !refused.text.contains("appVersion"), "{}", refused.text);
    }
    let found = client.call("system.which", r#"{"bins":["sh"]}"#).await.json();
    assert!(found["result"]["structuredContent"]["bins"]["sh"].as_str().unwrap().ends_with("/sh"), "{found}");

    let status = serving.winnode(&["--command", "app.connection.status"]).await;
    assert_eq!(
        status,
        json!({
            "bridge": { "state": "connected", "mcpUrl": session["mcp_url"], "error": null },
            "localMcp": { "state": "listening", "url": serving.url, "error": null },
        })
    );
    // Another socket, and the same session.
    let reconnected = serving.winnode(&["--command", "app.connection.reconnect"]).await;
    assert_eq!(reconnected, json!({ "reconnected": true }));
    until(async || serving.node.log().matches("bridge connected").count() == 2).await;
    assert!(client.call("device.status", "{}").await.json()["result"]["structuredContent"]["collectedAt"].is_string());

    serving.node.signal("-TERM");
    let (code, log) = serving.node.ended().await;
    assert_eq!(code, 0, "{log}");
    assert!(!log.contains("app-token") && !log.contains("ERROR"), "{log}");
}

#[tokio::test]
async fn without_a_bridge_that_works_the_local_server_goes_on() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token")]).await;
    let wrong = [("OPENCLAW_PROXY_APP_TOKEN", "wrong")];
    let serving = Serving::start(&["--proxy-url", &server.base], &wrong).await;
    until(async || serving.winnode(&["--command", "app.status"]).await["connectionStatus"] == "failed").await;
    let status = serving.winnode(&["--command", "app.status"]).await;
    assert_eq!((&status["localMcp"], &status["nodeConnected"]), (&json!("listening"), &json!(false)));
    assert!(status["nodeError"].as_str().unwrap().contains("OPENCLAW_PROXY_APP_TOKEN"), "{status}");
    // It tries again when it is told to, and only then.
    serving.winnode(&["--command", "app.connection.reconnect"]).await;
    until(async || serving.node.log().matches("the bridge has ended").count() == 2).await;

    let folder = Folder::new();
    let alone = spawn(&folder, &["--local-mcp", "off", "--proxy-url", &server.base], &wrong);
    let (code, log) = alone.ended().await;
    assert!(code == 78 && log.contains("refuses the app token"), "{code} {log}");
    assert!(!std::path::Path::new(&folder.path("mcp-token.txt")).exists(), "there was nothing to make a token for");
}

#[tokio::test]
async fn without_its_port_the_bridge_goes_on() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let server = TestServer::start(&[]).await;
    let folder = Folder::new();
    let mut node = spawn(&folder, &["--mcp-port", &port, "--proxy-url", &server.base], &[]);
    let (_, client) = node.session().await;
    assert!(node.log().contains(&format!("cannot listen on 127.0.0.1:{port}")), "{}", node.log());
    assert!(client.call("device.info", "{}").await.json()["result"]["structuredContent"]["deviceName"].is_string());

    let (code, log) = spawn(&folder, &["--mcp-port", &port], &[]).ended().await;
    assert!(code == 1 && log.contains("OPENCLAW_MCP_PORT"), "{code} {log}");
}

#[tokio::test]
async fn the_two_switches_are_kept_and_the_legacy_one_becomes_both() {
    let folder = Folder::new();
    folder.write("settings.json", r#"{"McpOnlyMode":true,"EnableNodeMode":true}"#);
    let server = TestServer::start(&[]).await;
    // A proxy is named, and the bridge is off all the same.
    let serving = Serving::start_in(folder, &["--proxy-url", &server.base], &[]).await;
    let status = serving.winnode(&["--command", "app.status"]).await;
    assert_eq!((&status["connectionStatus"], &status["localMcp"]), (&json!("disabled"), &json!("listening")));
    let kept: Value =
        serde_json::from_str(&std::fs::read_to_string(serving.folder.path("settings.json")).unwrap()).unwrap();
    assert_eq!(kept, json!({ "EnableMcpServer": true, "EnableNodeMode": false }));

    let folder = &serving.folder;
    assert_eq!(node(folder, &["settings", "set", "EnableMcpServer", "false"]).await.0, 0);
    let listed = node(folder, &["settings", "list"]).await.1;
    assert!(listed.contains("EnableMcpServer false\nEnableNodeMode false\nNodeSystemRunEnabled true"), "{listed}");
    let (code, log) = spawn(folder, &[], &[]).ended().await;
    assert!(code == 78 && log.contains("both the local MCP server and the bridge are switched off"), "{code} {log}");
    let unset = spawn(&Folder::new(), &["--local-mcp", "off"], &[]).ended().await;
    assert!(unset.0 == 78 && unset.1.contains("no proxy is named"), "{unset:?}");
    let no_url = spawn(&Folder::new(), &["--proxy-url", "127.0.0.1:8000"], &[]).ended().await;
    assert!(no_url.0 == 78 && no_url.1.contains("must be http://"), "{no_url:?}");
    // A flag wins over the file.
    let mut bridged = spawn(folder, &["--bridge", "on", "--proxy-url", &server.base], &[]);
    bridged.session().await;
    let (code, _, error) = node(folder, &["settings", "set", "Nonsense", "true"]).await;
    assert!(code == 78 && error.contains("There is no setting Nonsense"), "{code} {error}");
}

#[tokio::test]
async fn what_a_desktop_serves_locally_is_not_all_lent_when_its_server_is() {
    let server = TestServer::start(&[]).await;
    let serving = Serving::start(&[], &[]).await;
    let token_file = serving.folder.path("mcp-token.txt");
    let lend = async |more: &[&str]| {
        let args = ["lend", "--json", "--proxy-url", &*server.base, "--mcp-url", &*serving.url];
        let args = [&args[..], &["--mcp-token-file", &*token_file], more].concat();
        let mut node = Node::start(&args, &[]);
        let (session, client) = node.session().await;
        let names = session["tools"].as_array().unwrap().clone();
        (node, names, client)
    };
    let (_node, names, client) = lend(&[]).await;
    assert!(names.contains(&json!("device.info")) && names.contains(&json!("system.which")), "{names:?}");
    let is_home =
        |name: &Value| ["app.", "system.run", "system.exec"].iter().any(|s| name.as_str().unwrap().starts_with(s));
    assert!(!names.iter().any(is_home), "{names:?}");
    assert!(client.call("device.info", "{}").await.tool_text().contains("deviceName"));
    let (_node, names, _) = lend(&["--include", "system.run", "--include", "app.*"]).await;
    assert_eq!(names, [json!("system.run")]);
}

#[tokio::test]
async fn a_closed_log_does_not_end_the_node() {
    let folder = Folder::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_openclaw-node"))
        .args(["serve", "--json"])
        .env("OPENCLAW_TRAY_DATA_DIR", folder.path(""))
        .env("OPENCLAW_MCP_PORT", "0")
        .env("OPENCLAW_PROXY_LOG", "trace")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    // Nobody reads either of them.
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(child.stdout.take().unwrap()));
    let line: Value = serde_json::from_str(&soon(lines.next_line()).await.unwrap().unwrap()).unwrap();
    drop((lines, child.stderr.take()));
    let token = std::fs::read_to_string(folder.path("mcp-token.txt")).unwrap();
    let client = McpClient::new(line["local_mcp_url"].as_str().unwrap());
    let client = client.header("authorization", &format!("Bearer {token}"));
    for _ in 0..3 {
        assert!(client.call("device.info", "{}").await.tool_text().contains("deviceName"));
    }
    assert!(child.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn a_session_that_the_proxy_has_forgotten_is_not_told_as_if_it_were_there() {
    let server = TestServer::start(&[]).await;
    let port = server.port;
    let mut serving = Serving::start(&["--proxy-url", &server.base], &[]).await;
    let first = serving.node.line().await;
    serving.node.logged("bridge connected").await;
    server.stopped().await;
    let _server = TestServer::start_on(port, &[]).await;
    serving.node.logged("registering again").await;
    let status = async || serving.winnode(&["--command", "app.connection.status"]).await["bridge"].clone();
    until(async || status().await["mcpUrl"] != first["mcp_url"]).await;
    until(async || status().await["state"] == "connected" && status().await["mcpUrl"].is_string()).await;
}

#[tokio::test]
async fn every_variable_is_in_the_example_with_its_default_and_an_empty_one_counts_as_not_set() {
    use clap::Args;
    let example = include_str!("../.env.example");
    let lines: Vec<_> = example.lines().filter_map(|line| line.strip_prefix("# ")?.split_once('=')).collect();
    let command = ServeArgs::augment_args(clap::Command::new("serve"));
    let mut empty = Vec::new();
    for arg in command.get_arguments() {
        let Some(name) = arg.get_env().and_then(|name| name.to_str()) else { continue };
        if name == "OPENCLAW_PROXY_APP_TOKEN" || name == "OPENCLAW_PROXY_SERVER_URL" {
            continue;
        }
        let shown: Vec<_> = lines.iter().filter(|(shown, _)| *shown == name).collect();
        assert_eq!(shown.len(), 1, "{name}");
        let unset = if matches!(arg.get_action(), clap::ArgAction::SetTrue) { "false" } else { "" };
        let default = arg.get_default_values().first().map_or(unset, |value| value.to_str().unwrap());
        assert_eq!(shown[0].1, default, "{name}");
        if name != "OPENCLAW_MCP_PORT" {
            empty.push((name.to_owned(), ""));
        }
    }
    let empty: Vec<(&str, &str)> = empty.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let serving = Serving::start(&[], &empty).await;
    assert_eq!(serving.winnode(&["--command", "app.status"]).await["localMcp"], "listening");
}

#[tokio::test]
async fn a_real_client_lists_and_calls_what_the_node_serves() {
    let serving = Serving::start(&[], &[]).await;
    let client = McpClient::new(&serving.url).header("authorization", &format!("Bearer {}", serving.token()));
    let answered = client.call("device.info", "{}").await;
    assert!(answered.tool_text().contains("deviceName"), "{}", answered.text);
}
