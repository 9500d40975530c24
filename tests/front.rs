//! The reverse proxies of deploy/, with the samples as they are but for ports, certificate and users: what must pass
//! passes, and what strangers try at them ends there.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::support::{App, McpClient, TestServer, free_port, http, send, soon, until};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Nginx,
    Haproxy,
    Caddy,
}

/// A reverse proxy in front of a server of ours, and what speaks TLS to it: whatever comes to `base` by plain HTTP
/// reaches the front as TLS.
struct Front {
    base: String,
    port: u16,
    _server: TestServer,
    folder: PathBuf,
    _front: Child,
    tunnel: JoinHandle<()>,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.tunnel.abort();
        let _left_behind = std::fs::remove_dir_all(&self.folder);
    }
}

/// Replaces what stands there exactly once: a sample that has changed must not pass unnoticed.
fn adapt(sample: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(sample.to_owned(), |text, (from, to)| {
        assert_eq!(text.matches(from).count(), 1, "{from:?} in the sample");
        text.replace(from, to)
    })
}

impl Front {
    async fn start(kind: Kind, settings: &[(&str, &str)]) -> Self {
        Self::start_with(kind, settings, &[]).await
    }

    /// With `changes` to the sample.
    async fn start_with(kind: Kind, settings: &[(&str, &str)], changes: &[(&str, &str)]) -> Self {
        let tokens = [("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")];
        let server = TestServer::start(&[&tokens[..], settings].concat()).await;
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("front-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&folder).unwrap();
        let tls_port = free_port().await;
        let certificate = certificate(&folder).await;
        let mut command = start_command(kind, &folder, tls_port, server.port, changes);
        let log = std::fs::File::create(folder.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        let front = command.spawn().unwrap_or_else(|error| {
            panic!("cannot start {kind:?}: {error}; install it: apt-get install {}", format!("{kind:?}").to_lowercase())
        });
        let tunnel = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = tunnel.local_addr().unwrap().port();
        let tunnel = tokio::spawn(through_tls(tunnel, tls_port, certificate));
        let mut front =
            Front { base: format!("http://127.0.0.1:{port}"), port, _server: server, folder, _front: front, tunnel };
        front.wait_until_it_serves(kind).await;
        front
    }

    async fn wait_until_it_serves(&mut self, kind: Kind) {
        let health = format!("{}/health", self.base);
        let serves = until(async || {
            let reply = http().get(&health).send().await;
            reply.is_ok_and(|reply| reply.status() == 200)
        });
        if tokio::time::timeout(Duration::from_secs(15), serves).await.is_err() {
            let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            panic!("{kind:?} does not serve: {log}");
        }
    }

    async fn register(&self, registration: Value) -> App {
        let app = App::register_at_as(&self.base, registration, "app-token").await;
        // What leads to the front by TLS leads there through the tunnel as well.
        let plain = |url: &str| url.replacen("wss://", "ws://", 1).replacen("https://", "http://", 1);
        App { bridge_url: plain(&app.bridge_url), mcp_url: plain(&app.mcp_url), ..app }
    }
}

/// Sends raw bytes and reads until the other end closes, or for `wait` at the most.
async fn raw(port: u16, bytes: &[u8], wait: Duration) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut answer = Vec::new();
    // A peer that has seen enough may close before all is written.
    let _reset = stream.write_all(bytes).await;
    let _timed_out = tokio::time::timeout(wait, stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Makes a certificate for this test, and gives it.
async fn certificate(folder: &Path) -> CertificateDer<'static> {
    let openssl = async |arguments: &str| {
        let mut command = Command::new("openssl");
        command.args(arguments.split(' ')).current_dir(folder).stdin(Stdio::null());
        let output = command.output().await.expect("openssl is there; install it: apt-get install openssl");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    openssl(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem -days 2 \
         -subj /CN=localhost -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE",
    )
    .await;
    openssl("x509 -in cert.pem -outform der -out cert.der").await;
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    std::fs::write(folder.join("both.pem"), [read("cert.pem"), read("key.pem")].concat()).unwrap();
    read("cert.der").into()
}

/// The front's own start, with the sample's text.
fn start_command(kind: Kind, folder: &Path, tls_port: u16, port: u16, changes: &[(&str, &str)]) -> Command {
    let in_folder = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let upstream = format!("127.0.0.1:{port}");
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
    // Debian has them where only root's PATH leads.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(match kind {
        Kind::Nginx => "nginx",
        Kind::Haproxy => "haproxy",
        Kind::Caddy => "caddy",
    });
    match kind {
        Kind::Nginx => {
            let sample = adapt(
                &adapt(include_str!("../deploy/nginx.conf"), changes),
                &[
                    ("listen 443 ssl;", &format!("listen 127.0.0.1:{tls_port} ssl;")),
                    ("    listen [::]:443 ssl;\n", ""),
                    ("/etc/letsencrypt/live/mcp.example.com/fullchain.pem", &in_folder("cert.pem")),
                    ("/etc/letsencrypt/live/mcp.example.com/privkey.pem", &in_folder("key.pem")),
                    ("server 127.0.0.1:8000;", &format!("server {upstream};")),
                ],
            );
            write("sample.conf", sample);
            let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
                .map(|name| format!("{name}_temp_path {name};\n"))
                .concat();
            write(
                "nginx.conf",
                format!(
                    "daemon off;\nuser root;\nworker_processes 1;\npid nginx.pid;\nerror_log stderr;\n\
                     events {{ worker_connections 768; }}\n\
                     http {{\naccess_log off;\n{temporary}include sample.conf;\n}}\n"
                ),
            );
            command.args(["-e", "stderr", "-p", folder.to_str().unwrap(), "-c", "nginx.conf"]);
        }
        Kind::Haproxy => {
            let sample = adapt(
                &adapt(include_str!("../deploy/haproxy.cfg"), changes),
                &[
                    ("    user haproxy\n    group haproxy\n", ""),
                    (
                        "bind :443 ssl crt /etc/haproxy/certs/mcp.example.com.pem",
                        &format!("bind 127.0.0.1:{tls_port} ssl crt {}", in_folder("both.pem")),
                    ),
                    ("    bind [::]:443 v6only ssl crt /etc/haproxy/certs/mcp.example.com.pem alpn http/1.1\n", ""),
                    ("server proxy 127.0.0.1:8000", &format!("server proxy {upstream}")),
                ],
            );
            write("haproxy.cfg", sample);
            command.args(["-db", "-f", &in_folder("haproxy.cfg")]);
        }
        Kind::Caddy => {
            let site = "{$OPENCLAW_HOST:mcp.example.com} {\n";
            let sample = adapt(
                &adapt(include_str!("../deploy/Caddyfile"), changes),
                &[
                    // No certificate from outside, no port 80, no fixed port for administration.
                    ("{\n\tservers {\n", "{\n\tadmin off\n\tauto_https disable_redirects\n\tservers {\n"),
                    (site, &format!("{site}\ttls {} {}\n", in_folder("cert.pem"), in_folder("key.pem"))),
                ],
            );
            write("Caddyfile", sample);
            command.args(["run", "--adapter", "caddyfile", "--config", &in_folder("Caddyfile")]);
            command.env("OPENCLAW_HOST", format!("https://:{tls_port}")).env("OPENCLAW_UPSTREAM", upstream);
            command.env("XDG_DATA_HOME", folder).env("XDG_CONFIG_HOME", folder).env("HOME", folder);
        }
    }
    command.env("PATH", path);
    command
}

/// Carries plain connections to the front by TLS.
async fn through_tls(listener: TcpListener, port: u16, certificate: CertificateDer<'static>) {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let connector = TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
    let mut tunnels = tokio::task::JoinSet::new();
    while let Ok((mut client, _)) = listener.accept().await {
        let connector = connector.clone();
        tunnels.spawn(async move {
            let Ok(front) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            let Ok(mut front) = connector.connect(ServerName::try_from("localhost").unwrap(), front).await else {
                return;
            };
            let _either_has_gone = copy_bidirectional(&mut client, &mut front).await;
        });
    }
}

fn client(app: &App) -> McpClient {
    app.client().header("authorization", "Bearer claw-token")
}

/// What a deployment must do, whatever stands in front.
async fn serves_whatever_it_must(kind: Kind) {
    let settings = [("STREAM_AFTER_SECONDS", "0.2"), ("KEEP_ALIVE_SECONDS", "0.2")];
    let front = Front::start(kind, &settings).await;
    let schema =
        json!({ "type": "object", "properties": { "user_id": { "type": "string", "x-mcp-header": "user_id" } } });
    let registration = json!({
        "device_id": "d",
        "tools": [{ "name": "echo" }, { "name": "slow" }, { "name": "whose", "input_schema": schema }],
        "bridge_features": ["cancel", "progress"],
    });

    // The URLs are those by which the front is reached, whatever a stranger says of them.
    let honest = [
        format!("wss://127.0.0.1:{}/v1/chat/sessions/", front.port),
        format!("https://127.0.0.1:{}/v1/mcp/", front.port),
    ];
    for spoofed in [
        &[][..],
        &[("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "http")],
        &[("x-forwarded-host", "evil.example"), ("x-forwarded-host", "worse.example"), ("x-forwarded-proto", "ftp")],
        &[("forwarded", "for=6.6.6.6;host=evil.example;proto=http"), ("x-forwarded-for", "6.6.6.6")],
        &[("x-forwarded-port", "1"), ("x-forwarded-prefix", "/evil"), ("x-real-ip", "6.6.6.6")],
    ] {
        let mut request = http().post(format!("{}/v1/chat/sessions", front.base)).bearer_auth("app-token");
        for (name, value) in spoofed {
            request = request.header(*name, *value);
        }
        let reply = send(request.json(&registration)).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let urls = ["bridge_url", "mcp_url"].map(|url| reply.json()[url].as_str().unwrap().to_owned());
        assert!(urls.iter().zip(&honest).all(|(url, honest)| url.starts_with(honest)), "{spoofed:?}: {urls:?}");
    }

    // The upgrade works; so do the tokens, the session's header, and what clients of 2026-07-28 repeat in headers.
    let app = front.register(registration).await;
    let mut bridge = app.connect().await;
    assert_eq!(app.client().call("echo", "{}").await.status, 401);
    let bare = McpClient::new(&format!("{}/v1/mcp", front.base)).header("authorization", "Bearer claw-token");
    let by_header = bare.header("mcp-session-id", &app.id);
    let call = by_header.spawn_call("1", "echo", "{}");
    bridge.answer_next(r#""ok":true,"content":"by header""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "by header");
    let params = json!({ "name": "whose", "arguments": { "user_id": "u" } });
    let request = client(&app).modern_request("1", "tools/call", params.clone(), json!({}));
    let call = tokio::spawn(send(request.header("mcp-param-user_id", "u")));
    bridge.answer_next(r#""ok":true,"content":"modern""#).await;
    assert_eq!(call.await.unwrap().tool_text(), "modern");
    let silent = send(client(&app).modern_request("1", "tools/call", params, json!({}))).await;
    assert_eq!(silent.status, 400, "that header must have been there: {}", silent.text);

    // Large arguments and results.
    let large = "x".repeat(1_572_864);
    let call = client(&app).spawn_call("1", "echo", &format!(r#"{{"x":"{large}"}}"#));
    let (id, _, arguments) = bridge.invoked().await;
    assert_eq!(arguments["x"], large);
    bridge.answer(&id, &format!(r#""ok":true,"content":"{large}""#)).await;
    assert_eq!(call.await.unwrap().tool_text(), large);

    // An event arrives while the call still runs.
    let request =
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"slow","_meta":{"progressToken":1}}}"#;
    let response = tokio::spawn(client(&app).request(request).send());
    let (id, _, _) = bridge.invoked().await;
    let progress = json!({ "type": "tool_progress", "mcpSessionId": app.id, "request_id": id, "progress": 1 });
    bridge.send(progress).await;
    let mut events = soon(response).await.unwrap().unwrap().bytes_stream();
    let mut seen = String::new();
    while !seen.contains("notifications/progress") {
        seen.push_str(std::str::from_utf8(&soon(events.next()).await.unwrap().unwrap()).unwrap());
    }
    // So do the comments that keep the way open.
    let comments = seen.matches(":\n\n").count();
    while seen.matches(":\n\n").count() < comments + 2 {
        seen.push_str(std::str::from_utf8(&soon(events.next()).await.unwrap().unwrap()).unwrap());
    }
    assert_eq!(app.status().await.json()["calls_in_flight"], 1);
    bridge.answer(&id, r#""ok":true,"content":"the end""#).await;
    while let Some(piece) = soon(events.next()).await {
        seen.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }
    assert!(seen.contains("the end"), "{seen}");

    // A client that goes is told to the app, before and after the answer has begun.
    for streams in [false, true] {
        // One that takes no stream is written nothing while it waits, by which a front could notice.
        let accept = if streams { "text/event-stream" } else { "application/json" };
        let call = http().post(&app.mcp_url).bearer_auth("claw-token").header("accept", accept);
        let call = call.header("content-type", "application/json").body(request);
        let call = tokio::spawn(async move { call.send().await.unwrap().bytes_stream().collect::<Vec<_>>().await });
        let (id, _, _) = bridge.invoked().await;
        if streams {
            // The answer's head is out once the comments come.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        call.abort();
        let frame = bridge.recv().await;
        assert_eq!((&frame["type"], &frame["request_id"]), (&json!("cancel_tool"), &json!(id)));
        assert_eq!(frame["reason"], "client_disconnected");
    }
}

#[tokio::test]
async fn nginx_serves_whatever_it_must() {
    serves_whatever_it_must(Kind::Nginx).await;
}

#[tokio::test]
async fn haproxy_serves_whatever_it_must() {
    serves_whatever_it_must(Kind::Haproxy).await;
}

#[tokio::test]
async fn caddy_serves_whatever_it_must() {
    serves_whatever_it_must(Kind::Caddy).await;
}

/// The pings are what keeps a bridge open in a front that cuts what is idle.
async fn pings_keep_a_bridge_open(kind: Kind, changes: &[(&str, &str)]) {
    for (ping, stays) in [("0.5", true), ("20", false)] {
        let front = Front::start_with(kind, &[("PING_SECONDS", ping)], changes).await;
        let app = front.register(json!({ "device_id": "d", "tools": [{ "name": "echo" }] })).await;
        let mut bridge = app.connect().await;
        let alive = tokio::time::timeout(Duration::from_secs(6), async {
            while let Some(Ok(frame)) = bridge.socket.next().await {
                assert!(!frame.is_binary());
            }
        });
        assert_eq!(alive.await.is_err(), stays, "{kind:?}, a ping each {ping} s");
        assert_eq!(app.status().await.json()["bridge"]["connected"], stays);
    }
}

#[tokio::test]
async fn pings_keep_a_bridge_open_in_nginx() {
    pings_keep_a_bridge_open(Kind::Nginx, &[("proxy_read_timeout 150s;", "proxy_read_timeout 2s;")]).await;
}

#[tokio::test]
async fn pings_keep_a_bridge_open_in_haproxy() {
    let changes = [
        ("timeout client 150s", "timeout client 2s"),
        ("timeout server 150s", "timeout server 2s"),
        ("    timeout tunnel 1h\n", ""),
    ];
    pings_keep_a_bridge_open(Kind::Haproxy, &changes).await;
}

/// Requests that two servers may read differently. In each, what one of them takes for the end of the request's body
/// is followed by a request that deletes the session.
fn smuggling(app: &App) -> Vec<(&'static str, String)> {
    let id = &app.id;
    let auth = "Authorization: Bearer app-token\r\n";
    let tail = format!("DELETE /v1/chat/sessions/{id} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n");
    let head = |lines: &str| {
        format!(
            "POST /v1/chat/sessions HTTP/1.1\r\nHost: localhost\r\n{auth}Content-Type: application/json\r\n{lines}\r\n"
        )
    };
    let chunk = format!("{:x}\r\n{tail}\r\n0\r\n\r\n", tail.len());
    let all = 5 + tail.len();
    let ended = format!("0\r\n\r\n{tail}");
    vec![
        (
            "CL and TE, the length goes on",
            head(&format!("Content-Length: {all}\r\nTransfer-Encoding: chunked\r\n")) + &ended,
        ),
        (
            "TE and CL, the length goes on",
            head(&format!("Transfer-Encoding: chunked\r\nContent-Length: {all}\r\n")) + &ended,
        ),
        ("CL and TE, the chunks go on", head("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n") + &chunk),
        ("TE and CL, the chunks go on", head("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("two lengths", head(&format!("Content-Length: 0\r\nContent-Length: {}\r\n", tail.len())) + &tail),
        ("two lengths in one line", head(&format!("Content-Length: 0, {}\r\n", tail.len())) + &tail),
        ("a signed length", head("Content-Length: +0\r\n") + &tail),
        ("a length with a space in it", head("Content-Length: 0 0\r\n") + &tail),
        ("a length in hexadecimal", head(&format!("Content-Length: 0x{:x}\r\n", tail.len())) + &tail),
        ("a space before the colon", head("Transfer-Encoding : chunked\r\n") + &ended),
        ("a folded line", head("Transfer-Encoding:\r\n chunked\r\n") + &ended),
        ("a folded line of a length", head(&format!("X: a\r\n Content-Length: {}\r\n", tail.len())) + &tail),
        ("a NUL in a value", head("X: a\0b\r\nContent-Length: 0\r\n") + &tail),
        ("a NUL in a name", head("X\0: a\r\nContent-Length: 0\r\n") + &tail),
        ("an unknown coding", head("Transfer-Encoding: xchunked\r\n") + &ended),
        ("a coding with a control character", head("Transfer-Encoding: \x0bchunked\r\n") + &ended),
        ("two codings", head("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n") + &ended),
        ("chunked is not the last coding", head("Transfer-Encoding: chunked, gzip\r\n") + &ended),
        ("a chunk of no size", head("Transfer-Encoding: chunked\r\n") + "\r\n\r\n" + &tail),
        ("a chunk that is too large", head("Transfer-Encoding: chunked\r\n") + "10000000000000000\r\n\r\n" + &tail),
        ("a chunk whose end is missing", head("Transfer-Encoding: chunked\r\n") + "2\r\n{}x\r\n0\r\n\r\n" + &tail),
        ("a bare LF before a coding", head("X: a\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("a bare CR in a value", head("X: a\rTransfer-Encoding: chunked\r\nContent-Length: 4\r\n") + &chunk),
        ("HTTP/1.0 with a coding", head("Transfer-Encoding: chunked\r\n").replace("HTTP/1.1", "HTTP/1.0") + &ended),
        ("no version", format!("GET /health\r\n{tail}")),
    ]
}

/// No request within a request is carried out, and no answer says that something broke.
///
/// Fronts make one reading of what has two, and some read two whole requests then, answer both, and pass on two, each
/// with one length. That deceives nobody; what the front does not know of, though, must not happen behind it.
async fn nothing_is_smuggled(base: &str, is_front: bool) {
    let port = base.rsplit(':').next().unwrap().parse().unwrap();
    let register = async || App::register_at_as(base, json!({ "device_id": "d" }), "app-token").await;
    let names: Vec<_> = smuggling(&register().await).into_iter().map(|(case, _)| case).collect();
    for (at, case) in names.into_iter().enumerate() {
        let app = register().await;
        let (_, bytes) = smuggling(&app).swap_remove(at);
        let answer = raw(port, bytes.as_bytes(), Duration::from_millis(500)).await;
        let statuses: Vec<&str> = answer.split("HTTP/1.").skip(1).filter_map(|rest| rest.get(2..5)).collect();
        // A front may say so of a coding that it does not have, or of a body that it cannot pass on.
        let is_broken = |status: &&str| status.starts_with('5') && !(is_front && ["501", "502"].contains(status));
        assert!(!statuses.iter().any(is_broken), "{case}: {answer}");
        assert!(statuses.len() <= if is_front { 2 } else { 1 }, "{case}: {answer}");
        // Whoever comes next gets his own answer, on whichever connection the front takes.
        for _ in 0..3 {
            assert_eq!(send(http().get(format!("{base}/health"))).await.text, "ok", "{case}");
        }
        let session = format!("{base}/v1/chat/sessions/{}", app.id);
        let status = send(http().get(session).bearer_auth("app-token")).await.status;
        let expected = if statuses.len() == 2 && statuses[1] == "200" { 404 } else { 200 };
        assert_eq!(status, expected, "{case}: {answer}");
    }
}

#[tokio::test]
async fn nothing_is_smuggled_into_the_proxy() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    nothing_is_smuggled(&server.base, false).await;
}

async fn nothing_is_smuggled_through(kind: Kind) {
    let front = Front::start(kind, &[]).await;
    nothing_is_smuggled(&front.base, true).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_nginx() {
    nothing_is_smuggled_through(Kind::Nginx).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_haproxy() {
    nothing_is_smuggled_through(Kind::Haproxy).await;
}

#[tokio::test]
async fn nothing_is_smuggled_through_caddy() {
    nothing_is_smuggled_through(Kind::Caddy).await;
}
