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

/// A heading as GitHub links to it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-');
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_within_the_readme_lead_to_headings_and_the_contents_name_all_chapters() {
    let prose: String = README.split("```").step_by(2).collect();
    let headings = |level: &str| -> Vec<String> {
        prose.lines().filter_map(|line| line.strip_prefix(level)).map(|heading| anchor(heading.trim())).collect()
    };
    let (chapters, sections) = (headings("## "), headings("### "));
    for link in prose.split("](#").skip(1).filter_map(|rest| rest.split(')').next()) {
        assert!(chapters.iter().chain(&sections).any(|heading| heading == link), "#{link}");
    }
    let contents = prose.split("**Contents:**").nth(1).unwrap().split("\n\n").next().unwrap();
    assert!(chapters.len() > 10);
    for chapter in chapters {
        assert!(contents.contains(&format!("(#{chapter})")), "{chapter}");
    }
}

/// What programs of ours may print: the sources, without comments and tests.
fn source_lines() -> Vec<String> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut lines = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).unwrap();
                let program = text.split("#[cfg(test)]\nmod tests").next().unwrap();
                lines.extend(program.lines().filter(|line| !line.trim_start().starts_with("//")).map(str::to_owned));
            }
        }
    }
    lines
}

/// Whether `line` holds the parts of `said` between its ellipses, in their order.
fn says(line: &str, said: &str) -> bool {
    said.split('…').try_fold(line, |rest, part| rest.split_once(part).map(|(_, after)| after)).is_some()
}

#[test]
fn what_troubleshooting_quotes_is_what_the_programs_say() {
    let troubleshooting = README.split("\n## Troubleshooting\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let sources = source_lines();
    let mut quoted = 0;
    for row in troubleshooting.lines().filter(|line| line.starts_with("| ")) {
        let symptom = row.split(" | ").next().unwrap();
        let without_code: String = symptom.split('`').step_by(2).collect();
        for said in without_code.split('"').skip(1).step_by(2) {
            quoted += 1;
            assert!(said.chars().filter(|c| c.is_alphabetic()).count() >= 10, "{said:?} may be anything");
            assert!(sources.iter().any(|line| says(line, said)), "no program says {said:?}");
        }
    }
    assert!(quoted > 40, "{quoted}");
}

#[test]
fn every_setting_that_is_named_exists() {
    let known = include_str!("../.env.example");
    let is_of_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    for rest in README.split("OPENCLAW_").skip(1) {
        let name = format!("OPENCLAW_{}", rest.split(|c| !is_of_name(c)).next().unwrap());
        let is_other = ["OPENCLAW_BUILD_COMMIT", "OPENCLAW_STATE_DIR"].contains(&name.as_str()) || name.ends_with('_');
        assert!(is_other || known.contains(&format!("{name}=")), "{name}");
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
async fn a_sample_app_without_a_token_says_what_is_missing() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    for (program, app) in [("py-mcp2/bin/python", "tests/clients/app.py"), (NODE, "tests/clients/app.mjs")] {
        let mut command = Command::new(clients_dir().join(program));
        command.arg(app).env("OPENCLAW_PROXY_SERVER_URL", &server.base).env_remove("OPENCLAW_PROXY_APP_TOKEN");
        let output = soon(command.kill_on_drop(true).output()).await.unwrap();
        let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!output.status.success() && said.is_empty(), "{app}: {said}{error}");
        assert!(error.contains("A bearer token is missing"), "{app}: {error}");
        assert!(!error.contains("Traceback"), "{app}: {error}");
    }
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
