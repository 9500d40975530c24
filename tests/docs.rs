//! What the README promises, done.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::clients::{NODE, clients_dir};
use crate::support::{McpClient, TestServer, soon, until};

const README: &str = include_str!("../README.md");

/// The code blocks of a language.
fn blocks(language: &str) -> Vec<&'static str> {
    README
        .split("```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.strip_prefix(language)?.strip_prefix('\n'))
        .collect()
}

#[test]
fn the_sample_apps_are_the_ones_that_are_tested() {
    assert!(blocks("python").contains(&include_str!("clients/app.py")));
    assert!(blocks("js").contains(&include_str!("clients/app.mjs")));
}

#[test]
fn every_json_block_is_json_and_openclaw_gets_the_keys_it_knows() {
    let parsed: Vec<Value> = blocks("json").iter().map(|block| serde_json::from_str(block).expect(block)).collect();
    let openclaw: Vec<_> = parsed.iter().filter_map(|block| block["mcp"]["servers"]["my-app"].as_object()).collect();
    let transports: Vec<_> = openclaw.iter().map(|server| server["transport"].as_str().unwrap()).collect();
    assert_eq!(transports, ["streamable-http", "streamable-http", "stdio"]);
    for server in openclaw {
        let known = ["url", "transport", "headers", "requestTimeoutMs", "command", "env"];
        assert!(server.keys().all(|key| known.contains(&key.as_str())));
    }
}

#[test]
fn the_versions_in_the_table_are_those_that_are_installed() {
    let pins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/pins");
    let npm = |folder: &str, package: &str| {
        let manifest = std::fs::read_to_string(pins.join(folder).join("package.json")).unwrap();
        let manifest: Value = serde_json::from_str(&manifest).unwrap();
        manifest["dependencies"][package].as_str().unwrap().to_owned()
    };
    let pip = |folder: &str, package: &str| {
        let pinned = std::fs::read_to_string(pins.join(folder).join("requirements.txt")).unwrap();
        let version = pinned.lines().find_map(|line| line.strip_prefix(package)?.strip_prefix("=="));
        version.unwrap().to_owned()
    };
    for (client, version) in [
        ("| OpenClaw |", npm("openclaw", "openclaw")),
        ("modern mode) |", pip("py-mcp2", "mcp")),
        ("| Python SDK `mcp` |", pip("py-mcp1", "mcp")),
        ("| FastMCP |", pip("py-fastmcp", "fastmcp")),
        ("`@modelcontextprotocol/client` (legacy, auto, modern) |", npm("ts-v2", "@modelcontextprotocol/client")),
        ("`@modelcontextprotocol/sdk` |", npm("ts-v1", "@modelcontextprotocol/sdk")),
        ("| MCP Inspector |", npm("inspector", "@modelcontextprotocol/inspector")),
        ("| mcporter |", npm("mcporter", "mcporter")),
    ] {
        assert!(README.contains(&format!("{client} {version} |")), "{client} {version}");
    }
}

#[test]
fn links_within_the_project_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let prose: String = README.split("```").step_by(2).collect();
    for link in prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        if !link.contains("://") && !link.starts_with('#') {
            assert!(root.join(link).exists(), "{link}");
        }
    }
}

/// Starts a sample app and gives the MCP URL that it prints.
async fn lend(mut command: Command, server: &TestServer) -> (tokio::process::Child, String) {
    let mut child = command
        .env("OPENCLAW_PROXY_SERVER_URL", &server.base)
        .env("OPENCLAW_PROXY_APP_TOKEN", "app-token")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let url = soon(lines.next_line()).await.unwrap().expect("the app prints its MCP URL");
    (child, url)
}

async fn add(url: &str) {
    let client = McpClient::new(url).header("authorization", "Bearer claw-token");
    until(async || {
        client.call("add", r#"{"a":2,"b":40}"#).await.json()["result"]["structuredContent"] == json!({ "sum": 42 })
    })
    .await;
    assert!(client.call("add", r#"{"a":2}"#).await.json()["result"]["content"][0]["text"].is_string());
}

#[tokio::test]
async fn the_python_app_lends_its_tool() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    let mut python = Command::new(clients_dir().join("py-mcp2/bin/python"));
    python.arg("tests/clients/app.py");
    let (_app, url) = lend(python, &server).await;
    add(&url).await;
}

#[tokio::test]
async fn the_javascript_app_lends_its_tool() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    let mut node = Command::new(clients_dir().join(NODE));
    node.arg("tests/clients/app.mjs");
    let (_app, url) = lend(node, &server).await;
    add(&url).await;
}
