//! A real server, a real app and a real MCP client, with verbs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use openclaw_mcp_proxy::proxy::{Server, config::Config};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tokio_util::sync::CancellationToken;

/// How long anything that must happen may take. It only ends what hangs: the machine may be very busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for something that must happen.
pub async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it did not happen in time")
}

/// Waits until `condition` holds.
pub async fn until(condition: impl AsyncFn() -> bool) {
    soon(async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A port that nobody listens on, for a program that must be told one.
pub async fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// A setting's whole name.
pub fn setting(name: &str) -> String {
    if name.starts_with("OTEL_") { name.to_owned() } else { format!("OPENCLAW_PROXY_{name}") }
}

/// A server of one test, on a port of its own.
pub struct TestServer {
    pub base: String,
    pub port: u16,
    /// The operator's, if ADMIN_LISTEN is set.
    pub admin: Option<String>,
    shutdown: CancellationToken,
    running: Option<JoinHandle<()>>,
}

impl TestServer {
    /// Starts one; settings are named without their prefix, but for OpenTelemetry's.
    pub async fn start(settings: &[(&str, &str)]) -> Self {
        Self::start_on(0, settings).await
    }

    pub async fn start_on(port: u16, settings: &[(&str, &str)]) -> Self {
        let listen = ("LISTEN".to_owned(), format!("127.0.0.1:{port}"));
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let pairs = [listen].into_iter().chain(settings).map(|(name, value)| (setting(&name), value));
        let config = Config::from_pairs(pairs).expect("the settings of a test are usable");
        let server = Server::bind(config).await.unwrap();
        let admin = server.admin_addr().map(|address| format!("http://{address}"));
        let port = server.address().tcp().map_or(0, |address| address.port());
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(server.run(shutdown.clone()));
        TestServer { base: format!("http://127.0.0.1:{port}"), port, admin, shutdown, running: Some(running) }
    }

    /// Tells the server to stop, without waiting for it.
    pub fn begin_stop(&self) {
        self.shutdown.cancel();
    }

    /// Waits until the server has stopped.
    pub async fn stopped(mut self) {
        self.shutdown.cancel();
        soon(self.running.take().unwrap()).await.unwrap();
    }

    /// Sends raw bytes and reads until the server closes, or for `wait` at the most.
    pub async fn raw(&self, bytes: &[u8], wait: Duration) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        let _timed_out = tokio::time::timeout(wait, stream.read_to_end(&mut answer)).await;
        String::from_utf8_lossy(&answer).into_owned()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// An HTTP answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {:?}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The text of the first block of a tools/call result.
    pub fn tool_text(&self) -> String {
        self.json()["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{}", self.text)).to_owned()
    }

    pub fn is_tool_error(&self) -> bool {
        self.json()["result"]["isError"] == true
    }
}

/// Sends a request and reads the whole answer. No `Mcp-Session-Id` may ever come back.
pub async fn send(request: reqwest::RequestBuilder) -> Reply {
    let response = soon(request.send()).await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    assert!(!headers.contains_key("mcp-session-id"), "an Mcp-Session-Id was sent");
    Reply { status, headers, text: soon(response.text()).await.unwrap() }
}

pub fn http() -> reqwest::Client {
    reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap()
}

/// An app: what it registered, and how it is reached.
#[derive(Clone)]
pub struct App {
    pub id: String,
    pub bridge_url: String,
    pub mcp_url: String,
    pub registration: Value,
    pub token: String,
}

/// The tools that most tests need: they take anything.
pub fn tools(names: &[&str]) -> Value {
    names.iter().map(|name| json!({ "name": name, "description": "A tool." })).collect()
}

impl App {
    pub async fn register(server: &TestServer) -> App {
        App::register_with(server, json!({ "device_id": "d", "tools": tools(&["echo", "slow"]) })).await
    }

    pub async fn register_with(server: &TestServer, registration: Value) -> App {
        App::register_as(server, registration, "").await
    }

    pub async fn register_as(server: &TestServer, registration: Value, token: &str) -> App {
        App::register_at_as(&server.base, registration, token).await
    }

    /// Registers at a server that is a process of its own.
    pub async fn register_at(base: &str, registration: Value) -> App {
        App::register_at_as(base, registration, "").await
    }

    pub async fn register_at_as(base: &str, registration: Value, token: &str) -> App {
        let request = http().post(format!("{base}/v1/chat/sessions")).bearer_auth(token).json(&registration);
        let reply = send(request).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let registration = reply.json();
        let text = |name: &str| registration[name].as_str().unwrap().to_owned();
        App {
            id: text("mcpSessionId"),
            bridge_url: text("bridge_url"),
            mcp_url: text("mcp_url"),
            token: token.to_owned(),
            registration,
        }
    }

    /// Connects the bridge and waits until the proxy counts it as connected.
    pub async fn connect(&self) -> Bridge {
        let bridge = self.dial().await;
        self.wait_connected(true).await;
        bridge
    }

    /// Opens the WebSocket, whatever becomes of it.
    pub async fn dial(&self) -> Bridge {
        let mut request = self.bridge_url.as_str().into_client_request().unwrap();
        if !self.token.is_empty() {
            request.headers_mut().insert("authorization", format!("Bearer {}", self.token).parse().unwrap());
        }
        let (socket, _) = soon(connect_async(request)).await.unwrap();
        Bridge { id: self.id.clone(), socket }
    }

    pub fn session_url(&self) -> String {
        self.bridge_url.replace("ws://", "http://").replace("/bridge", "")
    }

    /// What `GET /v1/chat/sessions/{id}` says.
    pub async fn status(&self) -> Reply {
        send(http().get(self.session_url()).bearer_auth(&self.token)).await
    }

    pub async fn wait_connected(&self, connected: bool) {
        until(async || self.status().await.json()["bridge"]["connected"] == connected).await;
    }

    pub async fn delete(&self) -> Reply {
        send(http().delete(self.session_url()).bearer_auth(&self.token)).await
    }

    /// A client of this session, at its own URL.
    pub fn client(&self) -> McpClient {
        McpClient::new(&self.mcp_url)
    }
}

/// The app's end of a bridge.
pub struct Bridge {
    pub id: String,
    pub socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
}

impl Bridge {
    /// The next frame that is not a ping.
    pub async fn recv(&mut self) -> Value {
        // Pings are not what must happen.
        soon(async {
            loop {
                let text = self.recv_text().await;
                let frame: Value = serde_json::from_str(&text).unwrap();
                if frame["type"] != "ping" {
                    return frame;
                }
            }
        })
        .await
    }

    /// The next text frame, as text.
    pub async fn recv_text(&mut self) -> String {
        loop {
            match soon(self.socket.next()).await {
                Some(Ok(Message::Text(text))) => return text.as_str().to_owned(),
                Some(Ok(Message::Close(close))) => panic!("the bridge was closed: {close:?}"),
                Some(Ok(_)) => {}
                other => panic!("the bridge ended: {other:?}"),
            }
        }
    }

    /// The next `invoke_tool`: its request id, tool and arguments.
    pub async fn invoked(&mut self) -> (String, String, Value) {
        let frame = self.recv().await;
        assert_eq!(frame["type"], "invoke_tool", "{frame}");
        assert_eq!(frame["mcpSessionId"], self.id.as_str());
        let text = |name: &str| frame[name].as_str().unwrap().to_owned();
        (text("request_id"), text("tool_name"), frame["arguments"].clone())
    }

    pub async fn send_text(&mut self, text: impl Into<Utf8Bytes>) {
        soon(self.socket.send(Message::Text(text.into()))).await.unwrap();
    }

    pub async fn send(&mut self, frame: Value) {
        self.send_text(frame.to_string()).await;
    }

    /// Answers a call; `members` is the rest of the frame, as text.
    pub async fn answer(&mut self, request_id: &str, members: &str) {
        let id = &self.id;
        let frame =
            format!(r#"{{"type":"invoke_result","mcpSessionId":"{id}","request_id":"{request_id}",{members}}}"#);
        self.send_text(frame).await;
    }

    /// Waits for the call and answers it with these members.
    pub async fn answer_next(&mut self, members: &str) {
        let (request_id, _, _) = self.invoked().await;
        self.answer(&request_id, members).await;
    }

    /// Waits for the close frame: its code and reason.
    pub async fn closed(&mut self) -> (u16, String) {
        soon(async {
            loop {
                match self.socket.next().await {
                    Some(Ok(Message::Close(Some(CloseFrame { code, reason })))) => {
                        return (code.into(), reason.to_string());
                    }
                    Some(Ok(_)) => {}
                    other => panic!("the bridge ended without a close frame: {other:?}"),
                }
            }
        })
        .await
    }

    /// Answers every call with its own arguments, until the socket goes.
    pub fn echo(mut self) -> JoinHandle<()> {
        tokio::spawn(async move {
            while let Some(Ok(message)) = self.socket.next().await {
                let Message::Text(text) = message else { continue };
                let frame: Value = serde_json::from_str(&text).unwrap();
                let reply = match frame["type"].as_str() {
                    Some("ping") => json!({ "type": "pong" }),
                    Some("invoke_tool") => json!({
                        "type": "invoke_result",
                        "mcpSessionId": frame["mcpSessionId"],
                        "request_id": frame["request_id"],
                        "ok": true,
                        "content": frame["arguments"],
                    }),
                    _ => continue,
                };
                if self.socket.send(Message::text(reply.to_string())).await.is_err() {
                    return;
                }
            }
        })
    }
}

/// An MCP client that says exactly what a test wants it to.
#[derive(Clone)]
pub struct McpClient {
    pub url: String,
    pub headers: Vec<(String, String)>,
    http: reqwest::Client,
}

impl McpClient {
    pub fn new(url: &str) -> Self {
        McpClient { url: url.to_owned(), headers: Vec::new(), http: http() }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn request(&self, body: impl Into<String>) -> reqwest::RequestBuilder {
        let mut request = self
            .http
            .post(&self.url)
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .body(body.into());
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request
    }

    pub async fn post(&self, body: impl Into<String>) -> Reply {
        send(self.request(body)).await
    }

    /// A request of a legacy client.
    pub async fn rpc(&self, id: &str, method: &str, params: &str) -> Reply {
        self.post(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)).await
    }

    /// tools/call of a legacy client.
    pub async fn call(&self, tool: &str, arguments: &str) -> Reply {
        self.call_as("1", tool, arguments).await
    }

    pub async fn call_as(&self, id: &str, tool: &str, arguments: &str) -> Reply {
        self.rpc(id, "tools/call", &format!(r#"{{"name":"{tool}","arguments":{arguments}}}"#)).await
    }

    /// tools/call in a task of its own.
    pub fn spawn_call(&self, id: &str, tool: &str, arguments: &str) -> JoinHandle<Reply> {
        let (client, id, tool, arguments) = (self.clone(), id.to_owned(), tool.to_owned(), arguments.to_owned());
        tokio::spawn(async move { client.call_as(&id, &tool, &arguments).await })
    }

    /// A request of a 2026-07-28 client, with the headers that go with it.
    pub fn modern_request(&self, id: &str, method: &str, params: Value, meta: Value) -> reqwest::RequestBuilder {
        let mut params = params;
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        for (key, value) in meta.as_object().into_iter().flatten() {
            params["_meta"][key] = value.clone();
        }
        let mut request = self
            .request(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#))
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", method);
        if let Some(name) = params["name"].as_str() {
            request = request.header("mcp-name", name);
        }
        request
    }

    pub async fn modern(&self, method: &str, params: Value) -> Reply {
        send(self.modern_request("1", method, params, json!({}))).await
    }
}

/// How long something took.
pub async fn timed<F: Future>(future: F) -> (F::Output, Duration) {
    let start = Instant::now();
    let output = future.await;
    (output, start.elapsed())
}

/// A TCP relay in front of a server that cuts its connections, by RST or FIN, in the middle of whatever is under way.
pub struct Relay {
    pub port: u16,
    state: watch::Sender<RelayState>,
    carried: Arc<Carried>,
    relaying: JoinHandle<()>,
}

#[derive(Clone, Copy)]
struct RelayState {
    target: u16,
    /// How often connections were cut.
    cuts: u64,
    /// Whether new ones are let through.
    is_open: bool,
}

/// What went through a relay.
#[derive(Default)]
struct Carried {
    /// How many bytes went to the server.
    up: AtomicU64,
    /// All that came from the server.
    down: Mutex<Vec<u8>>,
}

impl Relay {
    /// Relays to `target`; each connection lives for a random time of up to `longest`, if that is given.
    pub async fn start(target: u16, longest: Option<Duration>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (state, watched) = watch::channel(RelayState { target, cuts: 0, is_open: true });
        let carried = Arc::<Carried>::default();
        let carrying = carried.clone();
        let relaying = tokio::spawn(async move {
            let mut tasks = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (mut watched, carried) = (watched.clone(), carrying.clone());
                let RelayState { target, cuts, is_open } = *watched.borrow_and_update();
                if !is_open {
                    continue;
                }
                tasks.spawn(async move {
                    let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
                    let life = longest.map_or(Duration::MAX, |longest| longest.mul_f64(random()));
                    tokio::select! {
                        () = relay(client, server, &carried) => {}
                        () = tokio::time::sleep(life) => {}
                        _ = watched.wait_for(|state| state.cuts > cuts) => {}
                    }
                });
            }
        });
        Relay { port, state, carried, relaying }
    }

    /// Cuts all connections that there are.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// Cuts all connections and lets no new ones through.
    pub fn close(&self) {
        self.state.send_modify(|state| state.is_open = false);
        self.cut();
    }

    /// Lets connections through again, to the server of this port.
    pub fn open(&self, target: u16) {
        self.state.send_modify(|state| (state.target, state.is_open) = (target, true));
    }

    /// How many bytes have gone to the server.
    pub fn sent(&self) -> u64 {
        self.carried.up.load(Ordering::Relaxed)
    }

    /// Whether this text has come from the server.
    pub fn has_brought(&self, text: &str) -> bool {
        self.carried.down.lock().unwrap().windows(text.len()).any(|window| window == text.as_bytes())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.relaying.abort();
    }
}

/// Copies both ways. Dropped half-way it closes both sockets: by RST where bytes wait unread, else by FIN.
async fn relay(mut client: TcpStream, mut server: TcpStream, carried: &Carried) {
    if random() < 0.5 {
        client.set_zero_linger().unwrap();
        server.set_zero_linger().unwrap();
    }
    let (client_reader, client_writer) = client.split();
    let (server_reader, server_writer) = server.split();
    tokio::select! {
        () = copy(client_reader, server_writer, |piece| _ = carried.up.fetch_add(piece.len() as u64, Ordering::Relaxed)) => {}
        () = copy(server_reader, client_writer, |piece| carried.down.lock().unwrap().extend_from_slice(piece)) => {}
    }
}

async fn copy(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, carry: impl Fn(&[u8])) {
    // Small pieces, so that cuts fall within frames.
    let mut buffer = [0; 64];
    while let Ok(read) = from.read(&mut buffer).await {
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            break;
        }
        carry(&buffer[..read]);
    }
}

/// From 0 to 1.
pub fn random() -> f64 {
    let bits = uuid::Uuid::new_v4().as_u128() as u32;
    f64::from(bits) / f64::from(u32::MAX)
}
