//! The command line for the local MCP server, against a real one and against servers that misbehave.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use openclaw_mcp_proxy::auth::Token;
use openclaw_mcp_proxy::node::Setup;
use openclaw_mcp_proxy::node::capabilities::Exposure;
use openclaw_mcp_proxy::node::local_mcp::Config;
use openclaw_mcp_proxy::node::token;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::local_mcp::Local;
use crate::support::{soon, timed};

/// What a run of the program left behind.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs the program with these variables and no others.
pub async fn winnode(env: &[(&str, &str)], args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_winnode"));
    command.env_clear().envs(env.iter().copied()).args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = soon(command.output()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A server of one answer, which gives back the request that it got.
async fn stub(answer: impl Into<Vec<u8>>) -> (String, JoinHandle<String>) {
    let answer = answer.into();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&request).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head
                    .lines()
                    .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
                if body.len() >= length.unwrap_or(0) {
                    break;
                }
            }
            assert!(stream.read_buf(&mut request).await.unwrap() > 0);
        }
        // A client that has read enough closes the connection.
        let _broken = stream.write_all(&answer).await;
        let _broken = stream.shutdown().await;
        String::from_utf8(request).unwrap()
    });
    (url, served)
}

/// A whole HTTP answer.
fn http_answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// A folder of one test.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("winnode-{name}-{}", std::process::id()));
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[tokio::test]
async fn usage_is_printed_where_it_helps() {
    let none = winnode(&[], &[]).await;
    assert_eq!((none.code, &*none.stderr), (2, ""));
    assert!(none.stdout.starts_with("Usage: winnode"));
    for args in [&["--help"][..], &["-h"], &["--command", "x", "--help"]] {
        let help = winnode(&[], args).await;
        assert_eq!((help.code, &*help.stderr, &help.stdout), (0, "", &none.stdout));
    }
    for (args, named) in [
        (&["--bogus"][..], "--bogus"),
        (&["--verbose"], "--command"),
        (&["--command"], "--command"),
        (&["--command", "x", "--list-tools"], "--list-tools"),
        (&["--command", "x", "--mcp-port", "0"], "--mcp-port"),
        (&["--command", "x", "--invoke-timeout", "600001"], "--invoke-timeout"),
    ] {
        let ran = winnode(&[], args).await;
        assert_eq!((ran.code, &ran.stdout), (2, &none.stdout), "{args:?}");
        assert!(ran.stderr.contains(named), "{ran:?}");
    }
    for args in [
        &["--command", "x", "--params", "{"][..],
        &["--command", "x", "--params", "@/no/such/file"],
        &["--command", "x", "--params", "@"],
        &["--command", "x", "--mcp-url", "not a url"],
        &["--command", "x", "--mcp-url", "htttp://localhost/"],
        &["--command", "x", "--mcp-url", "file:///etc/passwd"],
        &["--command", "x", "--mcp-url", "ftp://localhost/"],
        &["--command", "x", "--identity", "other"],
    ] {
        let ran = winnode(&[], args).await;
        assert_eq!((ran.code, &*ran.stdout), (2, ""), "{args:?}");
        assert!(ran.stderr.starts_with("[winnode] "), "{ran:?}");
    }
    for params in ["[]", "\"s\"", "42", "true", "null"] {
        let ran = winnode(&[], &["--command", "x", "--params", params]).await;
        assert!(ran.code == 2 && ran.stderr.contains("must be a JSON object"), "{ran:?}");
    }
    let identity = winnode(&[("OPENCLAW_APP_IDENTITY", "other")], &["--list-tools"]).await;
    assert!(identity.code == 2 && identity.stderr.contains("OPENCLAW_APP_IDENTITY"), "{identity:?}");
}

#[tokio::test]
async fn it_calls_a_real_server_and_prints_the_result() {
    let local = Local::start_with(Config { token: Token::new("secret"), ..Config::default() }).await;
    let port = local.port.to_string();
    let env = [("OPENCLAW_MCP_PORT", &*port), ("OPENCLAW_MCP_TOKEN", "secret")];
    let ran = winnode(&env, &["--command", "test.echo", "--params", r#"{"text":"x"}"#]).await;
    assert_eq!((ran.code, &*ran.stderr), (0, ""));
    assert_eq!(ran.stdout, "{\n  \"echoed\": \"x\",\n  \"list\": []\n}\n");

    let listed = winnode(&env, &["--list-tools"]).await;
    let tools: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!((listed.code, &tools["tools"][0]["name"]), (0, &json!("test.echo")));

    let file = folder("params").join("params.json");
    std::fs::write(&file, "\u{feff}{\"text\":\"from a file\"}\n").unwrap();
    let ran = winnode(&env, &["--command", "test.echo", "--params", &format!("@{}", file.display())]).await;
    assert!(ran.code == 0 && ran.stdout.contains("from a file"), "{ran:?}");

    for (tool, says) in [
        ("test.fail", "kaboom"),
        ("test.crash", "JSON-RPC error -32603: internal error"),
        ("no.such", "Unknown tool: no.such"),
    ] {
        let ran = winnode(&env, &["--command", tool]).await;
        assert_eq!((ran.code, &*ran.stdout, &*ran.stderr), (1, "", &*format!("[winnode] {says}\n")));
    }
    let refused = winnode(&env[..1], &["--list-tools"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("HTTP 401: missing or invalid bearer token"), "{refused:?}");
}

#[tokio::test]
async fn the_nodes_own_commands_answer() {
    let local = Local::start().await;
    let standard = openclaw_mcp_proxy::node::registry(Setup::in_folder(&folder("commands")));
    local.registry.replace(standard.local().into_iter().map(|capability| (capability, Exposure::Everywhere)).collect());
    let port = local.port.to_string();
    let run = async |args: &[&str]| {
        let ran = winnode(&[], &[&["--mcp-port", &port], args].concat()).await;
        assert_eq!((ran.code, &*ran.stderr), (0, ""), "{ran:?}");
        serde_json::from_str::<Value>(&ran.stdout).unwrap()
    };
    let listed = run(&["--list-tools"]).await;
    // Those that show nothing and start nothing.
    let is_harmless = |name: &str| ["system.which", "system.notify"].contains(&name) || name.starts_with("device.");
    for tool in listed["tools"].as_array().unwrap() {
        let name = tool["name"].as_str().unwrap();
        assert!(
            tool["description"].as_str().unwrap().len() > 20 && tool["inputSchema"]["properties"].is_object(),
            "{tool}"
        );
        if !is_harmless(name) {
            continue;
        }
        let params = if name == "system.which" { r#"{"bins":["sh","cmd"]}"# } else { "{}" };
        assert!(run(&["--command", name, "--params", params]).await.is_object(), "{name}");
    }
    let wrong = winnode(&[], &["--mcp-port", &port, "--command", "system.which"]).await;
    assert_eq!((wrong.code, &*wrong.stderr), (1, "[winnode] Missing bins parameter\n"));
}

#[tokio::test]
async fn the_request_is_exactly_what_was_asked_for() {
    let (url, served) = stub(http_answer("200 OK", r#"{"jsonrpc":"2.0","id":1,"result":{}}"#)).await;
    let params = r#"{"z":1.0,"a":{"n":9007199254740993}}"#;
    let ran = winnode(&[], &["--command", "a.b", "--params", params, "--mcp-url", &url]).await;
    assert_eq!((ran.code, &*ran.stdout, &*ran.stderr), (0, "{}\n", ""));
    let request = served.await.unwrap();
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    assert_eq!(
        body,
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"a.b","arguments":{params}}}}}"#)
    );
    let head = head.to_ascii_lowercase();
    assert!(
        head.starts_with("post / http/1.1\r\n") && head.contains("content-type: application/json; charset=utf-8"),
        "{head}"
    );
    for header in ["authorization", "origin", "referer", "sec-fetch", "cookie"] {
        assert!(!head.contains(header), "{head}");
    }
    let (url, served) = stub(http_answer("200 OK", r#"{"result":{"tools":[]}}"#)).await;
    assert_eq!(winnode(&[], &["--list-tools", "--mcp-url", &url]).await.code, 0);
    assert!(served.await.unwrap().ends_with("\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/list\"}"));
}

#[tokio::test]
async fn whatever_goes_wrong_is_a_line_and_a_one() {
    let secret = "s".repeat(40);
    let long = format!("{}x", " ".repeat(16 * 1024 * 1024));
    for (answer, says) in [
        (http_answer("500 Internal Server Error", "boom\nmore"), "HTTP 500: boom"),
        (http_answer("302 Found\r\nLocation: http://127.0.0.1:1/", ""), "HTTP 302"),
        (http_answer("200 OK", "<html>"), "not a JSON object: <html>"),
        (http_answer("200 OK", r#"{"id":1}"#), "holds no result"),
        (http_answer("200 OK", &long), "more than 16777216 bytes"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{".to_owned(), "closed the connection"),
        (
            http_answer("200 OK", &format!(r#"{{"error":{{"code":5,"message":"a\u001b[2Jb {secret}"}}}}"#)),
            "JSON-RPC error 5: a[2Jb <redacted>",
        ),
    ] {
        let (url, _served) = stub(answer).await;
        let ran = winnode(&[], &["--command", "x", "--mcp-url", &url]).await;
        assert!(ran.code == 1 && ran.stdout.is_empty() && ran.stderr.contains(says), "{says}: {ran:?}");
        assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
    }
    let (url, _served) = stub(http_answer("500 Internal Server Error", "boom\nmore")).await;
    assert!(winnode(&[], &["--command", "x", "--mcp-url", &url, "--verbose"]).await.stderr.contains("boom\nmore"));

    // Once the listener is gone, nobody listens on its port.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let (closed, took) = timed(winnode(&[], &["--command", "x", "--mcp-url", &format!("http://{address}/")])).await;
    assert!(closed.code == 1 && closed.stderr.contains(&address) && closed.stderr.contains("enabled"), "{closed:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    let (ran, took) = timed(winnode(&[], &["--command", "x", "--mcp-url", &url, "--invoke-timeout", "1"])).await;
    assert!(ran.code == 1 && ran.stderr.contains("timed out"), "{ran:?}");
    assert!((5..15).contains(&took.as_secs()), "{took:?}");
}

/// The `Authorization` header that the program sends, and what it says on stderr.
async fn authorization(env: &[(&str, &str)], args: &[&str]) -> (Option<String>, Ran) {
    let (url, served) = stub(http_answer("200 OK", r#"{"result":{}}"#)).await;
    let ran = winnode(env, &[&["--list-tools", "--mcp-url", &url], args].concat()).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let request = soon(served).await.unwrap();
    let header = request.lines().find_map(|line| line.strip_prefix("authorization: ").map(str::to_owned));
    (header, ran)
}

#[tokio::test]
async fn the_token_comes_from_flag_environment_or_file_in_this_order() {
    let settings = folder("token");
    let release = token::load_or_create(&settings.join("OpenClawTray").join(token::FILE_NAME)).unwrap();
    let dev = token::load_or_create(&settings.join("OpenClawTray-Dev").join(token::FILE_NAME)).unwrap();
    let data = folder("token-data");
    std::fs::write(data.join(token::FILE_NAME), " \n").unwrap();
    let (settings, data) = (settings.to_str().unwrap(), data.to_str().unwrap());
    let appdata = ("OPENCLAW_TRAY_APPDATA_DIR", settings);
    let dev_identity = ("OPENCLAW_APP_IDENTITY", "dev");
    let in_env = ("OPENCLAW_MCP_TOKEN", "from-env");
    let bearer = |token: &str| Some(format!("Bearer {token}"));
    for (env, args, expected, label) in [
        (&[][..], &[][..], None, "none"),
        (&[appdata], &[], bearer(release.expose()), "bearer (file)"),
        (&[appdata, dev_identity], &[], bearer(dev.expose()), "bearer (file)"),
        (&[appdata, dev_identity], &["--identity", "release"], bearer(release.expose()), "bearer (file)"),
        (&[appdata, ("OPENCLAW_TRAY_DATA_DIR", data)], &[], None, "none"),
        (&[appdata, in_env], &[], bearer("from-env"), "bearer (OPENCLAW_MCP_TOKEN)"),
        (&[appdata, in_env], &["--mcp-token", "from-flag"], bearer("from-flag"), "bearer (--mcp-token)"),
    ] {
        let args = [args, &["--verbose"]].concat();
        let (sent, ran) = authorization(env, &args).await;
        assert_eq!(sent, expected, "{env:?}");
        assert!(ran.stderr.contains(&format!("auth: {label}\n")), "{ran:?}");
        for secret in [release.expose(), dev.expose(), "from-env", "from-flag", settings] {
            assert!(!ran.stderr.contains(secret), "{ran:?}");
        }
        assert_eq!(ran.stderr.contains("process listings"), args.len() > 1 && args[0] == "--mcp-token", "{ran:?}");
    }
    let (sent, ran) = authorization(&[appdata], &[]).await;
    assert_eq!((sent, &*ran.stderr), (bearer(release.expose()), ""));
    for odd in ["a b", "a\tb", "a\nb", "\u{e9}"] {
        let (sent, ran) = authorization(&[("OPENCLAW_MCP_TOKEN", odd)], &[]).await;
        assert!(sent.is_none() && ran.stderr.contains("invalid characters"), "{ran:?}");
    }
}

#[tokio::test]
async fn verbose_tells_what_is_done_and_the_rest_is_silent() {
    let (_, ran) =
        authorization(&[("OPENCLAW_MCP_PORT", "none")], &["--verbose", "--node", "n", "--idempotency-key", "k"]).await;
    for says in [
        "endpoint: http://127.0.0.1:",
        "command: tools/list",
        "auth: none",
        "--node is ignored",
        "--idempotency-key is ignored",
    ] {
        assert!(ran.stderr.contains(says), "{says}: {ran:?}");
    }
    let (_, ran) = authorization(&[], &["--verbose"]).await;
    assert!(!ran.stderr.contains("--node") && !ran.stderr.contains("--idempotency-key"), "{ran:?}");
    let (_, ran) = authorization(&[], &["--node", "n", "--idempotency-key", "k"]).await;
    assert!(ran.stderr.contains("--idempotency-key") && !ran.stderr.contains("--node"), "{ran:?}");
}

#[tokio::test]
async fn a_token_is_not_sent_to_another_machine_unless_it_is_named() {
    // The name resolves to nothing; what would be sent is decided before.
    let settings = folder("off-loopback");
    let file = settings.join(token::FILE_NAME);
    token::load_or_create(&file).unwrap();
    let data = ("OPENCLAW_TRAY_DATA_DIR", settings.to_str().unwrap());
    let args = ["--list-tools", "--verbose", "--mcp-url", "http://example.invalid:1/"];
    let ran = winnode(&[data], &args).await;
    assert!(ran.stderr.contains("not sent") && ran.stderr.contains("auth: none"), "{ran:?}");
    let ran = winnode(&[data, ("OPENCLAW_MCP_TOKEN", "named")], &args).await;
    assert!(ran.stderr.contains("WARN: the token is sent") && ran.stderr.contains("auth: bearer"), "{ran:?}");
}

#[cfg(unix)]
#[tokio::test]
async fn a_token_file_must_be_where_it_seems_and_readable() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let home = folder("file-rules");
    let elsewhere = home.join("elsewhere");
    token::load_or_create(&elsewhere.join(token::FILE_NAME)).unwrap();
    let data = home.join("data");
    std::fs::create_dir(&data).unwrap();
    let file = data.join(token::FILE_NAME);
    let run = async || {
        winnode(&[("OPENCLAW_TRAY_DATA_DIR", data.to_str().unwrap())], &["--list-tools", "--mcp-port", "1"]).await
    };

    symlink(elsewhere.join(token::FILE_NAME), &file).unwrap();
    let ran = run().await;
    assert!(ran.code == 1 && ran.stderr.contains("leads elsewhere"), "{ran:?}");
    std::fs::remove_file(&file).unwrap();
    symlink("/no/such/file", &file).unwrap();
    assert!(run().await.stderr.contains("cannot be read"));
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, b"\xff").unwrap();
    assert!(run().await.stderr.contains("cannot be read"));
    std::fs::write(&file, "loose").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let (url, served) = stub(http_answer("200 OK", r#"{"result":{}}"#)).await;
    let ran =
        winnode(&[("OPENCLAW_TRAY_DATA_DIR", data.to_str().unwrap())], &["--list-tools", "--mcp-url", &url]).await;
    assert!(
        ran.code == 0 && ran.stderr.contains("[winnode] WARN: the token file can be read by other users"),
        "{ran:?}"
    );
    assert!(served.await.unwrap().contains("Bearer loose"));
}
