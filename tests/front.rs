//! The reverse proxies of deploy/, with the samples as they are but for ports, certificate and users: what must pass
//! passes, and what strangers try at them ends there.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::clients::clients_dir;
use crate::support::{App, TestServer, free_port, http, until};

/// What must pass through a front.
mod serving;
/// What must not.
mod smuggling;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Nginx,
    Haproxy,
    Caddy,
    Traefik,
}

impl Kind {
    fn program(self) -> &'static str {
        match self {
            Kind::Nginx => "nginx",
            Kind::Haproxy => "haproxy",
            Kind::Caddy => "caddy",
            Kind::Traefik => "traefik",
        }
    }
}

/// How a front reaches the proxy.
enum Upstream {
    Tcp(u16),
    Unix(PathBuf),
}

impl Upstream {
    /// As the front's configuration has it.
    fn written_for(&self, kind: Kind) -> String {
        match (self, kind) {
            (Upstream::Tcp(port), _) => format!("127.0.0.1:{port}"),
            (Upstream::Unix(path), Kind::Nginx) => format!("unix:{}", path.display()),
            (Upstream::Unix(path), Kind::Haproxy) => format!("unix@{}", path.display()),
            (Upstream::Unix(path), Kind::Caddy) => format!("unix/{}", path.display()),
            (Upstream::Unix(_), Kind::Traefik) => panic!("Traefik knows no Unix sockets"),
        }
    }
}

/// A reverse proxy in front of a server of ours, and what speaks TLS to it: whatever comes to `base` by plain HTTP
/// reaches the front as TLS.
pub struct Front {
    base: String,
    port: u16,
    pub tls_port: u16,
    pub server: TestServer,
    pub folder: PathBuf,
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

/// Both tokens, unless the settings have others.
fn with_tokens<'a>(settings: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut all = vec![("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")];
    all.retain(|(name, _)| !settings.iter().any(|(set, _)| set == name));
    all.extend(settings);
    all
}

impl Front {
    async fn start(kind: Kind, settings: &[(&str, &str)]) -> Self {
        Self::start_with(kind, settings, &[]).await
    }

    /// With `changes` to the sample.
    async fn start_with(kind: Kind, settings: &[(&str, &str)], changes: &[(&str, &str)]) -> Self {
        let server = TestServer::start(&with_tokens(settings)).await;
        let upstream = Upstream::Tcp(server.port);
        let mut front = Self::in_front_of(server, upstream, kind, changes, &Paper::default()).await;
        front.wait_until_it_serves(kind).await;
        front
    }

    /// The proxy listens on a Unix socket.
    async fn start_over_unix(kind: Kind, settings: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("ocp-{}", uuid::Uuid::new_v4().simple()));
        let listen = format!("unix:{}", path.display());
        let server = TestServer::start(&[&with_tokens(settings)[..], &[("LISTEN", &listen)]].concat()).await;
        let mut front = Self::in_front_of(server, Upstream::Unix(path), kind, &[], &Paper::default()).await;
        front.wait_until_it_serves(kind).await;
        front
    }

    /// With a certificate of its own as well, and without waiting until it serves: it may never do.
    pub async fn launch(kind: Kind, settings: &[(&str, &str)], changes: &[(&str, &str)], paper: &Paper) -> Self {
        let server = TestServer::start(&with_tokens(settings)).await;
        let upstream = Upstream::Tcp(server.port);
        Self::in_front_of(server, upstream, kind, changes, paper).await
    }

    async fn in_front_of(
        server: TestServer,
        upstream: Upstream,
        kind: Kind,
        changes: &[(&str, &str)],
        paper: &Paper,
    ) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("front-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&folder).unwrap();
        let tls_port = free_port().await;
        let certificate = certificate(&folder, paper).await;
        let mut command = start_command(kind, &folder, tls_port, &upstream.written_for(kind), changes);
        let log = std::fs::File::create(folder.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        let front = command.spawn().unwrap_or_else(|error| {
            panic!("cannot start {kind:?}: {error}; tests/run installs it, or apt-get install {}", kind.program())
        });
        let tunnel = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = tunnel.local_addr().unwrap().port();
        let tunnel = tokio::spawn(through_tls(tunnel, tls_port, certificate));
        Front { base: format!("http://127.0.0.1:{port}"), port, tls_port, server, folder, _front: front, tunnel }
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

/// What a certificate says.
pub struct Paper {
    pub name: &'static str,
    pub days: u32,
    /// When it was made, as faketime takes it.
    pub made: &'static str,
}

impl Default for Paper {
    fn default() -> Self {
        Paper { name: "localhost", days: 90, made: "1 hour ago" }
    }
}

/// Makes a certificate for this test, and gives it.
async fn certificate(folder: &Path, paper: &Paper) -> CertificateDer<'static> {
    let Paper { name, days, made } = paper;
    let openssl = async |arguments: &str| {
        let mut command = Command::new("faketime");
        command.args([made, "openssl"]).args(arguments.split(' ')).current_dir(folder).stdin(Stdio::null());
        let output = command.output().await.expect("faketime is there; install it: apt-get install faketime openssl");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    openssl(&format!(
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem -days {days} \
         -subj /CN={name} -addext subjectAltName=DNS:{name} -addext basicConstraints=critical,CA:FALSE",
    ))
    .await;
    openssl("x509 -in cert.pem -outform der -out cert.der").await;
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    std::fs::write(folder.join("both.pem"), [read("cert.pem"), read("key.pem")].concat()).unwrap();
    read("cert.der").into()
}

/// The front's own start, with the sample's text.
fn start_command(kind: Kind, folder: &Path, tls_port: u16, upstream: &str, changes: &[(&str, &str)]) -> Command {
    let in_folder = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
    let mut command = match kind {
        Kind::Traefik => Command::new(clients_dir().join("traefik/bin/traefik")),
        _ => Command::new(kind.program()),
    };
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
        Kind::Traefik => {
            let sample = adapt(
                &adapt(include_str!("../deploy/traefik.yaml"), changes),
                &[
                    ("rule: Host(`mcp.example.com`)", "rule: Host(`127.0.0.1`)"),
                    ("/etc/letsencrypt/live/mcp.example.com/fullchain.pem", &in_folder("cert.pem")),
                    ("/etc/letsencrypt/live/mcp.example.com/privkey.pem", &in_folder("key.pem")),
                    ("http://127.0.0.1:8000", &format!("http://{upstream}")),
                ],
            );
            // The static configuration is the command line that the sample tells of.
            let flags = sample.lines().filter(|line| line.starts_with('#')).flat_map(str::split_whitespace);
            let line = flags.filter(|word| word.starts_with("--")).collect::<Vec<_>>().join(" ");
            let line = adapt(
                &line,
                &[
                    ("/etc/traefik/openclaw-mcp-proxy.yaml", &in_folder("traefik.yaml")),
                    ("address=:443", &format!("address=127.0.0.1:{tls_port}")),
                ],
            );
            command.args(line.split(' '));
            // It would ask for news and tell of itself, in time.
            command.args(["--global.checkNewVersion=false", "--global.sendAnonymousUsage=false"]);
            write("traefik.yaml", sample);
        }
    }
    // Debian has some where only root's PATH leads.
    command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
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
