//! A headless Chromium, steered over the DevTools protocol.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};

use crate::support::soon;

/// A browser with one page.
pub struct Chromium {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    session: Option<String>,
    last_id: u64,
    /// What has happened in the page: errors and requests.
    events: Vec<Value>,
    _browser: Child,
    profile: PathBuf,
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _killed = self._browser.start_kill();
        // Its processes write until they notice that it has gone.
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

impl Chromium {
    /// Starts one that shows nothing yet.
    pub async fn start() -> Self {
        let profile = std::env::temp_dir().join(format!("openclaw-test-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&profile).unwrap();
        let mut command = Command::new("chromium");
        command.args([
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            "--no-first-run",
            "--disable-background-networking",
        ]);
        command.args(["--disable-sync", "--remote-debugging-port=0", "about:blank"]);
        command.arg(format!("--user-data-dir={}", profile.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let browser = command.spawn().expect("chromium starts; install it: apt-get install chromium");
        let file = profile.join("DevToolsActivePort");
        let url = soon(async {
            loop {
                // The port is in the first line, a path in the second.
                if let Ok(text) = std::fs::read_to_string(&file)
                    && let Some((port, path)) = text.split_once('\n')
                {
                    break format!("ws://127.0.0.1:{port}{}", path.trim());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let (socket, _) = soon(connect_async_with_config(url, Some(config), false)).await.unwrap();
        let mut chromium =
            Chromium { socket, session: None, last_id: 0, events: Vec::new(), _browser: browser, profile };
        let target = chromium.send("Target.createTarget", json!({ "url": "about:blank" })).await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = chromium.send("Target.attachToTarget", attach).await;
        chromium.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network", "Accessibility"] {
            chromium.send(&format!("{domain}.enable"), json!({})).await;
        }
        chromium
    }

    /// Sends a command and waits for what comes of it.
    pub async fn send(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut command = json!({ "id": self.last_id, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = session.as_str().into();
        }
        soon(self.socket.send(Message::text(command.to_string()))).await.unwrap();
        loop {
            let message = soon(self.socket.next()).await.expect("the browser is there").unwrap();
            let Message::Text(text) = message else { continue };
            let mut message: Value = serde_json::from_str(&text).unwrap();
            if message["id"] == self.last_id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].take();
            }
            self.events.push(message);
        }
    }

    pub async fn open(&mut self, url: &str) {
        let opened = self.send("Page.navigate", json!({ "url": url })).await;
        assert!(opened.get("errorText").is_none(), "{opened}");
    }

    /// The value of an expression, which may be a promise.
    pub async fn eval(&mut self, expression: &str) -> Value {
        let how = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true });
        let mut done = self.send("Runtime.evaluate", how).await;
        assert!(done.get("exceptionDetails").is_none(), "{expression}: {done}");
        done["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub async fn until(&mut self, expression: &str) {
        let holds = tokio::time::timeout(crate::support::PATIENCE, async {
            while self.eval(&format!("!!({expression})")).await != true {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        if holds.await.is_err() {
            let text = self.eval("document.body.innerText").await;
            panic!("this did not become true: {expression}\n{}", text.as_str().unwrap_or_default());
        }
    }

    /// The text of the element with this id.
    pub async fn text(&mut self, id: &str) -> String {
        let text = self.eval(&format!("document.getElementById('{id}').innerText")).await;
        text.as_str().unwrap_or_else(|| panic!("no element is called {id}")).to_owned()
    }

    /// How large the page is, and whether it is dark.
    pub async fn look(&mut self, width: u32, height: u32, is_dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.send("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if is_dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.send("Emulation.setEmulatedMedia", media).await;
    }

    fn happened<'a>(&'a self, method: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["method"] == method).map(|event| &event["params"])
    }

    /// What the page has asked for, wherever.
    pub fn requests(&self) -> Vec<String> {
        let requests = self.happened("Network.requestWillBeSent");
        requests.map(|request| request["request"]["url"].as_str().unwrap().to_owned()).collect()
    }

    /// What went wrong in the page: exceptions, errors in its console, and dialogs, which it never opens.
    pub fn errors(&self) -> Vec<&Value> {
        let logged = self.happened("Log.entryAdded").filter(|params| params["entry"]["level"] == "error");
        let told = self.happened("Runtime.consoleAPICalled").filter(|params| params["type"] == "error");
        let thrown = self.happened("Runtime.exceptionThrown").chain(self.happened("Page.javascriptDialogOpening"));
        logged.chain(told).chain(thrown).collect()
    }
}
