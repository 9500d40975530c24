//! The apps that cope with networks, `tests/clients/resuming_app.*`: real processes, one of them in a real browser,
//! against a real server whose connections are cut.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpListener;
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;

use crate::clients::{NODE, clients_dir};
use crate::support::{McpClient, Relay, TestServer, http, send, soon, until};

const TOKENS: [(&str, &str); 2] = [("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")];

/// The same app in two languages; each test is done with both at once.
#[derive(Debug, Clone, Copy)]
enum Language {
    Python,
    JavaScript,
}

async fn with_both(test: impl AsyncFn(Language)) {
    tokio::join!(test(Language::Python), test(Language::JavaScript));
}

/// A running app.
struct Sample {
    language: Language,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Sample {
    /// Starts one that reaches its proxy at this port.
    fn start(language: Language, port: u16) -> Self {
        Self::start_with(language, port, "app-token", None)
    }

    fn start_with(language: Language, port: u16, token: &str, bridge_url: Option<&str>) -> Self {
        let (interpreter, file) = match language {
            Language::Python => ("py-mcp2/bin/python", "tests/clients/resuming_app.py"),
            Language::JavaScript => (NODE, "tests/clients/resuming_app.mjs"),
        };
        let interpreter = clients_dir().join(interpreter);
        assert!(interpreter.exists(), "{} is missing: run tests/run, which installs it", interpreter.display());
        let mut child = Command::new(interpreter)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(file))
            .args(bridge_url)
            .env("OPENCLAW_PROXY_SERVER_URL", format!("http://127.0.0.1:{port}"))
            .env("OPENCLAW_PROXY_APP_TOKEN", token)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Sample { language, child, lines }
    }

    /// Waits for the next session that the app prints, and until its bridge is connected. `port` is the server's own.
    async fn session(&mut self, port: u16) -> Session {
        let url = soon(self.lines.next_line()).await.unwrap().expect("the app prints its MCP URL");
        let session = Session::new(&url, port);
        until(async || session.status().await["bridge"]["connected"] == true).await;
        session
    }

    /// Waits until the app has stopped by itself; what it said last.
    async fn stopped(mut self) -> String {
        let status = soon(self.child.wait()).await.unwrap();
        assert_eq!(status.code(), Some(1), "{:?}", self.language);
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).await.unwrap();
        said.lines().last().unwrap_or_else(|| panic!("{:?} says why it stops", self.language)).to_owned()
    }
}

/// A session that an app has registered, reached without the relay.
struct Session {
    url: String,
    client: McpClient,
}

impl Session {
    fn new(mcp_url: &str, port: u16) -> Self {
        let id = mcp_url.rsplit('/').next().unwrap();
        let base = format!("http://127.0.0.1:{port}/v1");
        let client = McpClient::new(&format!("{base}/mcp/{id}")).header("authorization", "Bearer claw-token");
        Session { url: format!("{base}/chat/sessions/{id}"), client }
    }

    async fn status(&self) -> Value {
        send(http().get(&self.url).bearer_auth("app-token")).await.json()
    }

    async fn adds(&self) {
        let reply = self.client.call("add", r#"{"a":2,"b":40}"#).await;
        assert_eq!(reply.json()["result"]["structuredContent"], json!({ "sum": 42 }));
    }

    /// Calls `sleep` and waits until its first progress shows that the app works on it.
    async fn sleep(&self, id: &str, ms: u32) -> Sleeping {
        let params = json!({ "name": "sleep", "arguments": { "ms": ms }, "_meta": { "progressToken": id } });
        let body = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params });
        Sleeping(soon(self.client.request(body.to_string()).send()).await.unwrap())
    }

    async fn cancel(&self, id: &str) {
        let cancelled = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"ID"}}"#;
        self.client.post(cancelled.replace("ID", id)).await;
    }
}

/// A call that is under way.
struct Sleeping(reqwest::Response);

impl Sleeping {
    /// The result that its event stream ends with.
    async fn result(self) -> Value {
        let text = soon(self.0.text()).await.unwrap();
        let last = text.rsplit("data: ").next().unwrap();
        serde_json::from_str::<Value>(last).unwrap_or_else(|error| panic!("{error}: {text}"))["result"].clone()
    }

    async fn error(self) -> String {
        let result = self.result().await;
        assert_eq!(result["isError"], true, "{result}");
        result["content"][0]["text"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn calls_survive_cut_sockets() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        let relay = Relay::start(server.port, None).await;
        let mut app = Sample::start(language, relay.port);
        let session = app.session(server.port).await;
        // Some end while the app is away, some after it has come back.
        let times = [100, 200, 400, 600, 1000, 2000];
        let calls = join_all(times.iter().map(|ms| session.sleep("x", *ms))).await;
        relay.close();
        until(async || session.status().await["bridge"]["connected"] == false).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        relay.open(server.port);
        until(async || session.status().await["bridge"]["connected"] == true).await;
        relay.cut();
        for (call, ms) in calls.into_iter().zip(times) {
            assert_eq!(call.result().await["structuredContent"], json!({ "slept_ms": ms }), "{language:?}");
        }
        until(async || session.status().await["bridge"]["epoch"].as_u64() >= Some(3)).await;
        assert!(relay.has_brought("\"hello\"") && !relay.has_brought("redelivery"), "{language:?} ran a call twice");
        session.adds().await;
    })
    .await;
}

#[tokio::test]
async fn work_that_nobody_wants_stops() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        let relay = Relay::start(server.port, None).await;
        let mut app = Sample::start(language, relay.port);
        let session = app.session(server.port).await;
        let step = Duration::from_millis(200);

        // Told by a frame: it reports progress until then, and nothing after it, no result either.
        let call = session.sleep("1", 2000).await;
        session.cancel("1").await;
        assert_eq!(call.error().await, "Tool call was cancelled.");
        tokio::time::sleep(Duration::from_millis(100)).await;
        let cancelled = relay.sent();
        tokio::time::sleep(3 * step).await;
        assert_eq!(relay.sent(), cancelled, "{language:?}");

        // Not told by a frame, for there was no socket.
        let call = session.sleep("2", 20_000).await;
        relay.close();
        until(async || session.status().await["bridge"]["connected"] == false).await;
        session.cancel("2").await;
        assert_eq!(call.error().await, "Tool call was cancelled.");
        relay.open(server.port);
        until(async || session.status().await["bridge"]["connected"] == true).await;
        let connected = relay.sent();
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(relay.sent() - connected < 100, "{language:?}");
        session.adds().await;
    })
    .await;
}

#[tokio::test]
async fn after_a_restart_of_the_proxy_the_app_registers_again() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        // It holds the port while nobody listens there.
        let relay = Relay::start(server.port, None).await;
        let mut app = Sample::start(language, relay.port);
        let before = app.session(server.port).await;
        before.adds().await;
        server.stopped().await;
        let server = TestServer::start(&TOKENS).await;
        relay.open(server.port);
        let after = app.session(server.port).await;
        assert_ne!(before.url, after.url);
        after.adds().await;
    })
    .await;
}

#[tokio::test]
async fn a_second_copy_of_the_app_stops_and_the_first_goes_on() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        let mut app = Sample::start(language, server.port);
        let session = app.session(server.port).await;
        let bridge_url = format!("{}/bridge", session.url.replace("http://", "ws://"));
        let second = Sample::start_with(language, server.port, "app-token", Some(&bridge_url));
        assert_eq!(second.stopped().await, "Another bridge of this session is connected.", "{language:?}");
        assert_eq!(session.status().await["bridge"]["epoch"], 1);
        session.adds().await;
    })
    .await;
}

#[tokio::test]
async fn an_app_that_is_not_wanted_stops_and_says_why() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        let refused = Sample::start_with(language, server.port, "wrong", None).stopped().await;
        assert!(refused.contains("The bearer token is not valid"), "{language:?}: {refused}");
        let mut app = Sample::start(language, server.port);
        let session = app.session(server.port).await;
        let bridge_url = format!("{}/bridge", session.url.replace("http://", "ws://"));
        let refused = Sample::start_with(language, server.port, "wrong", Some(&bridge_url)).stopped().await;
        assert_eq!(refused, "The app token is missing or not valid.", "{language:?}");
        send(http().delete(&session.url).bearer_auth("app-token")).await;
        assert_eq!(app.stopped().await, "The session was deleted.", "{language:?}");
    })
    .await;
}

#[tokio::test]
async fn an_app_that_is_started_again_runs_nothing_again() {
    with_both(async |language| {
        let server = TestServer::start(&TOKENS).await;
        let mut app = Sample::start(language, server.port);
        let session = app.session(server.port).await;
        let call = session.sleep("1", 10_000).await;
        app.child.kill().await.unwrap();
        until(async || session.status().await["bridge"]["connected"] == false).await;
        let bridge_url = format!("{}/bridge", session.url.replace("http://", "ws://"));
        let _again = Sample::start_with(language, server.port, "app-token", Some(&bridge_url));
        assert_eq!(call.error().await, "The tool may have run.", "{language:?}");
        session.adds().await;
    })
    .await;
}

/// The page that runs the app; what it prints is sent to the test.
const PAGE: &str = r#"<!doctype html>
<script>
  globalThis.settings = { OPENCLAW_PROXY_SERVER_URL: "$url", OPENCLAW_PROXY_APP_TOKEN: "app-token" };
  console.log = (line) => fetch("/printed", { method: "POST", body: line });
</script>
<script type="module" src="/resuming_app.mjs"></script>"#;

/// Serves the page and the app; the lines that the page prints come out of the receiver.
fn serve_page(listener: TcpListener, proxy: &str) -> mpsc::Receiver<String> {
    let page = PAGE.replace("$url", proxy);
    let (printed, lines) = mpsc::channel(8);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (page, printed) = (page.clone(), printed.clone());
            tokio::spawn(async move {
                let mut request = Vec::new();
                let (head, body) = loop {
                    if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                        return;
                    }
                    let text = String::from_utf8_lossy(&request);
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length = head.to_ascii_lowercase();
                    let length = length.split_once("content-length: ").map_or("0", |(_, rest)| rest);
                    if body.len() >= length.lines().next().unwrap().parse().unwrap() {
                        break (head.to_owned(), body.to_owned());
                    }
                };
                let (kind, body) = match head.split(' ').nth(1).unwrap() {
                    "/" => ("text/html", page.as_str()),
                    "/resuming_app.mjs" => ("text/javascript", include_str!("clients/resuming_app.mjs")),
                    "/printed" => {
                        printed.send(body).await.unwrap();
                        ("text/plain", "")
                    }
                    _ => ("text/plain", "nothing here"),
                };
                let length = body.len();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
                );
                let _gone = stream.write_all((head + body).as_bytes()).await;
            });
        }
    });
    lines
}

/// A browser of one test, with a page open.
struct Browser {
    child: Child,
    profile: PathBuf,
}

impl Browser {
    fn open(url: &str) -> Self {
        let name = format!("chromium-{}", uuid::Uuid::new_v4().simple());
        let profile = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let child = Command::new("chromium")
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.display()))
            // The page has a name that is not loopback's, for those are let in anyhow.
            .args(["--host-resolver-rules=MAP app.example 127.0.0.1", url])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromium is missing: run tests/run, which installs it");
        Browser { child, profile }
    }

    /// Ends the browser as if its machine had died.
    async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ended = self.child.start_kill();
        // Its other processes end when they see that it is gone, and write until then.
        for _ in 0..100 {
            match std::fs::remove_dir_all(&self.profile) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                _ => break,
            }
        }
    }
}

#[tokio::test]
async fn a_web_page_lends_its_tools() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://app.example:{}", listener.local_addr().unwrap().port());
    let server = TestServer::start(&[&TOKENS[..], &[("ALLOWED_ORIGINS", &origin)]].concat()).await;
    let mut printed = serve_page(listener, &server.base);
    let mut browser = Browser::open(&origin);
    let url = soon(printed.recv()).await.expect("the page prints its MCP URL");
    let session = Session::new(&url, server.port);
    until(async || session.status().await["bridge"]["connected"] == true).await;
    session.adds().await;
    assert_eq!(session.sleep("1", 100).await.result().await["structuredContent"], json!({ "slept_ms": 100 }));
    browser.kill().await;
    until(async || session.status().await["bridge"]["connected"] == false).await;
}
