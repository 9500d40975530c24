//! The doctor before real reverse proxies: nothing to say of the samples of deploy/, and of each that was broken on
//! purpose exactly what was broken, with the line that mends it.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::front::{Front, Kind, Paper};
use crate::program::PROGRAM;
use crate::support::{TestServer, free_port, until};

const TOKENS: [(&str, &str); 2] =
    [("APP_TOKEN", "canary-app-0123456789"), ("OPENCLAW_TOKEN", "canary-claw-0123456789")];

/// What the doctor says.
struct Verdict {
    code: i32,
    text: String,
    report: Value,
}

impl Verdict {
    /// The checks that have found something, and what they say.
    fn findings(&self) -> Vec<(&str, &Value)> {
        let checks = self.report["checks"].as_object().unwrap_or_else(|| panic!("{}", self.text));
        let is_finding = |finding: &Value| finding["state"] == "problem" || finding["state"] == "warning";
        checks
            .iter()
            .filter(|(_, finding)| is_finding(finding))
            .map(|(name, finding)| (name.as_str(), finding))
            .collect()
    }

    fn finds_nothing(&self) {
        assert_eq!((self.findings(), self.code), (Vec::new(), 0), "{}", self.text);
        let checks = self.report["checks"].as_object().unwrap();
        assert!(checks.len() > 30 && checks.values().all(|check| check["state"] == "ok"), "{}", self.text);
    }

    /// These checks have found something and no other, and each names its line.
    fn finds(&self, expected: &[(&str, &str)]) {
        let mut names: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        let found = self.findings();
        assert_eq!(found.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names, "{}", self.text);
        for (name, line) in expected {
            let fixes = &self.report["checks"][name]["fixes"];
            let has_line = fixes.as_array().unwrap().iter().any(|fix| fix["line"].as_str().unwrap().contains(line));
            assert!(has_line, "{name} should name {line:?}: {fixes}");
        }
        let has_problem = found.iter().any(|(_, finding)| finding["state"] == "problem");
        assert_eq!(self.code, i32::from(has_problem), "{}", self.text);
    }
}

/// How the doctor is called.
struct Doctor {
    command: Command,
    idle: &'static str,
}

impl Doctor {
    fn new(url: &str) -> Self {
        let mut command = Command::new(PROGRAM);
        command.current_dir(env!("CARGO_TARGET_TMPDIR")).env_clear().stdin(Stdio::null()).kill_on_drop(true);
        command.args(["doctor", "--json", "--url", url]);
        let mut doctor = Doctor { command, idle: "0.5" };
        for (name, value) in TOKENS {
            doctor = doctor.set(name, value);
        }
        doctor
    }

    /// For a front, at this host and path.
    fn before(front: &Front, host: &str, path: &str) -> Self {
        let mut doctor = Doctor::new(&format!("https://{host}:{}{path}", front.tls_port));
        doctor.command.env("SSL_CERT_FILE", front.folder.join("cert.pem"));
        doctor
    }

    fn set(mut self, name: &str, value: &str) -> Self {
        self.command.env(format!("OPENCLAW_PROXY_{name}"), value);
        self
    }

    fn with(mut self, arguments: &[&str]) -> Self {
        self.command.args(arguments);
        self
    }

    fn idle(mut self, seconds: &'static str) -> Self {
        self.idle = seconds;
        self
    }

    async fn examine(mut self) -> Verdict {
        self.command.args(["--idle", self.idle]);
        let output = tokio::time::timeout(Duration::from_secs(100), self.command.output()).await;
        let output = output.expect("every wait of the doctor's has an end").unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!text.contains("canary") && !text.contains("panicked"), "{text}");
        let report = serde_json::from_str(&text).unwrap_or_default();
        Verdict { code: output.status.code().unwrap(), text, report }
    }
}

async fn front(kind: Kind, settings: &[(&str, &str)], changes: &[(&str, &str)]) -> Front {
    front_with(kind, settings, changes, &Paper::default()).await
}

async fn front_with(kind: Kind, settings: &[(&str, &str)], changes: &[(&str, &str)], paper: &Paper) -> Front {
    let front = Front::launch(kind, &[&TOKENS[..], settings].concat(), changes, paper).await;
    until(async || TcpStream::connect(("127.0.0.1", front.tls_port)).await.is_ok()).await;
    front
}

/// What the doctor says of a front with these changes to its sample.
async fn broken(kind: Kind, changes: &[(&str, &str)], expected: &[(&str, &str)]) {
    let front = front(kind, &[], changes).await;
    Doctor::before(&front, "localhost", "").examine().await.finds(expected);
}

async fn a_good_deployment(kind: Kind) {
    // Its sessions are deleted, or there would be no room the second time.
    let front = front(kind, &[("MAX_SESSIONS", "3")], &[]).await;
    for _ in 0..2 {
        Doctor::before(&front, "localhost", "").examine().await.finds_nothing();
    }
}

#[tokio::test]
async fn the_nginx_sample_is_well() {
    a_good_deployment(Kind::Nginx).await;
}

#[tokio::test]
async fn the_haproxy_sample_is_well() {
    a_good_deployment(Kind::Haproxy).await;
}

#[tokio::test]
async fn the_caddy_sample_is_well() {
    a_good_deployment(Kind::Caddy).await;
}

#[tokio::test]
async fn a_proxy_without_a_front_and_without_tokens_is_well_on_this_machine() {
    let server = TestServer::start(&[]).await;
    let doctor = Doctor::new(&server.base).set("APP_TOKEN", "").set("OPENCLAW_TOKEN", "");
    doctor.examine().await.finds_nothing();
}

#[tokio::test]
async fn sessions_with_secrets_are_examined_as_well() {
    let front = front(Kind::Nginx, &[("REQUIRE_SESSION_SECRET", "true")], &[]).await;
    Doctor::before(&front, "localhost", "").examine().await.finds_nothing();
}

const NGINX_LOCATION: &str = "    location / {\n        proxy_pass http://openclaw_mcp_proxy;\n";
const NGINX_UPGRADE: &str = "    proxy_set_header Upgrade           $openclaw_upgrade;\n    proxy_set_header Connection        $openclaw_connection;\n";
const NGINX_HOST: &str = "    proxy_set_header Host              $http_host;\n";
const NGINX_FORWARDED: &str = "    proxy_set_header Forwarded         \"\";\n";
const HAPROXY_FORWARDED: &str = "    http-request del-header Forwarded\n";
const CADDY_FORWARDED: &str = "\t\theader_up -Forwarded\n";

/// A line more in the sample of nginx.
fn nginx(line: &str) -> String {
    format!("{NGINX_FORWARDED}{line}\n")
}

/// A line more in the sample of HAProxy.
fn haproxy(line: &str) -> String {
    format!("{HAPROXY_FORWARDED}{line}\n")
}

#[tokio::test]
async fn nginx_that_forwards_no_upgrade() {
    let expected = [("websocket", "proxy_set_header Upgrade $http_upgrade;")];
    broken(Kind::Nginx, &[(NGINX_UPGRADE, "")], &expected).await;
}

#[tokio::test]
async fn nginx_that_speaks_http_1_0_to_the_proxy() {
    let expected = [("websocket", "proxy_http_version 1.1;")];
    broken(Kind::Nginx, &[("        proxy_http_version 1.1;\n", "")], &expected).await;
}

#[tokio::test]
async fn nginx_that_takes_bodies_of_a_megabyte() {
    let expected = [("body_size", "client_max_body_size 16m;")];
    broken(Kind::Nginx, &[("client_max_body_size 16m;", "client_max_body_size 1m;")], &expected).await;
}

#[tokio::test]
async fn fronts_that_lose_patience_after_two_seconds() {
    let changes = [("proxy_read_timeout 150s;", "proxy_read_timeout 2s;")];
    let nginx = front(Kind::Nginx, &[], &changes).await;
    let verdict = Doctor::before(&nginx, "localhost", "").idle("4").examine().await;
    verdict.finds(&[("idle_bridge", "proxy_read_timeout 150s;"), ("long_call", "proxy_read_timeout 150s;")]);
    let message = verdict.report["checks"]["idle_bridge"]["message"].as_str().unwrap();
    assert!(message.contains("closed after 2."), "{message}");

    let changes = [("    timeout tunnel 1h\n", "    timeout tunnel 2s\n")];
    let haproxy = front(Kind::Haproxy, &[], &changes).await;
    let verdict = Doctor::before(&haproxy, "localhost", "").idle("4").examine().await;
    verdict.finds(&[("idle_bridge", "timeout tunnel 1h")]);

    let changes = [("timeout server 150s", "timeout server 2s")];
    let haproxy = front(Kind::Haproxy, &[], &changes).await;
    let verdict = Doctor::before(&haproxy, "localhost", "").idle("4").examine().await;
    verdict.finds(&[("long_call", "timeout server 150s")]);
}

#[tokio::test]
async fn nginx_that_holds_events_back() {
    let buffers = "proxy_buffering on;\n        proxy_ignore_headers X-Accel-Buffering;";
    for gzip in ["", "gzip on; gzip_types *; gzip_min_length 1;"] {
        let changes = [("proxy_buffering off;", &*format!("{buffers}\n{gzip}"))];
        broken(Kind::Nginx, &changes, &[("streaming", "proxy_buffering off;")]).await;
    }
}

const CADDY_PROXY: &str = "reverse_proxy {$OPENCLAW_UPSTREAM:127.0.0.1:8000} {\n";

#[tokio::test]
async fn caddy_that_compresses_event_streams() {
    let encode = "encode gzip {\n\t\tminimum_length 1\n\t\tmatch {\n\t\t\theader Content-Type *\n\t\t}\n\t}\n\t";
    let changes = [(CADDY_PROXY, &*format!("{encode}{CADDY_PROXY}"))];
    broken(Kind::Caddy, &changes, &[("streaming", "encode")]).await;
}

#[tokio::test]
async fn fronts_that_take_authorization_away() {
    let line = nginx("proxy_set_header Authorization \"\";");
    let expected = [("authorization", "proxy_set_header Authorization $http_authorization;")];
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &expected).await;
    let line = haproxy("http-request del-header Authorization");
    broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &line)], &[("authorization", "del-header Authorization")]).await;
    let line = format!("{CADDY_FORWARDED}\t\theader_up -Authorization\n");
    broken(Kind::Caddy, &[(CADDY_FORWARDED, &line)], &[("authorization", "header_up -Authorization")]).await;
}

#[tokio::test]
async fn nginx_that_asks_for_a_password_of_its_own() {
    let line = nginx("auth_basic \"x\"; auth_basic_user_file cert.pem;");
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &[("authorization", "no auth_basic")]).await;
}

#[tokio::test]
async fn fronts_that_take_the_sessions_headers_away() {
    let line = nginx("proxy_set_header X-OpenClaw-Session-Id \"\";");
    let expected = [("session_headers", "proxy_set_header X-OpenClaw-Session-Id $http_x_openclaw_session_id;")];
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &expected).await;
    let line = haproxy("http-request del-header MCP-Session-Id");
    broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &line)], &[("session_headers", "del-header MCP-Session-Id")]).await;
}

#[tokio::test]
async fn fronts_that_take_headers_of_mcp_away() {
    let changes = [("    ignore_invalid_headers off;\n", "")];
    broken(Kind::Nginx, &changes, &[("mcp_headers", "ignore_invalid_headers off;")]).await;
    let line = haproxy("http-request del-header MCP-Protocol-Version");
    broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &line)], &[("mcp_headers", "del-header mcp-protocol-version")]).await;
}

#[tokio::test]
async fn nginx_that_passes_another_host() {
    let front = front(Kind::Nginx, &[("ALLOWED_HOSTS", "mcp.example")], &[(NGINX_HOST, "")]).await;
    let verdict = Doctor::before(&front, "localhost", "").examine().await;
    verdict.finds(&[("host", "proxy_set_header Host $http_host;")]);
}

#[tokio::test]
async fn fronts_whose_urls_lead_elsewhere() {
    let changes = [("X-Forwarded-Proto $scheme;", "X-Forwarded-Proto \"\";")];
    broken(Kind::Nginx, &changes, &[("public_urls", "proxy_set_header X-Forwarded-Proto $scheme;")]).await;
    // The port is lost.
    let changes = [
        (NGINX_HOST, "    proxy_set_header Host $host;\n"),
        ("X-Forwarded-Host  $http_host", "X-Forwarded-Host $host"),
    ];
    broken(Kind::Nginx, &changes, &[("public_urls", "proxy_set_header Host $http_host;")]).await;
    // nginx as it is without a word.
    let changes = [
        (NGINX_HOST, ""),
        ("    proxy_set_header X-Forwarded-Host  $http_host;\n", "    proxy_set_header X-Forwarded-Host \"\";\n"),
    ];
    broken(Kind::Nginx, &changes, &[("public_urls", "proxy_set_header Host $http_host;")]).await;
}

#[tokio::test]
async fn fronts_that_pass_on_what_strangers_say_of_the_url() {
    let changes = [("X-Forwarded-Host  $http_host;", "X-Forwarded-Host $http_x_forwarded_host;")];
    broken(Kind::Nginx, &changes, &[("spoofed_headers", "proxy_set_header X-Forwarded-Host $http_host;")]).await;
    let honest = "http-request set-header X-Forwarded-Proto https\n";
    let believing = "http-request set-header X-Forwarded-Proto https if !{ req.hdr(X-Forwarded-Proto) -m found }\n";
    let expected = [("spoofed_headers", "http-request set-header X-Forwarded-Proto https")];
    broken(Kind::Haproxy, &[(honest, believing)], &expected).await;
}

#[tokio::test]
async fn certificates_that_clients_do_not_take() {
    for (paper, host, line) in [
        (Paper { days: 1, made: "10 days ago", ..Paper::default() }, "localhost", "certbot renew"),
        (Paper { name: "other.example", ..Paper::default() }, "localhost", "server_name localhost;"),
        (Paper { days: 90, made: "85 days ago", ..Paper::default() }, "localhost", "certbot renew"),
    ] {
        let front = front_with(Kind::Nginx, &[], &[], &paper).await;
        Doctor::before(&front, host, "").examine().await.finds(&[("tls", line)]);
    }
    // Nobody vouches for it.
    let front = front(Kind::Nginx, &[], &[]).await;
    let mut doctor = Doctor::before(&front, "localhost", "");
    doctor.command.env_remove("SSL_CERT_FILE");
    doctor.examine().await.finds(&[("tls", "fullchain.pem")]);
    // There is no TLS at all.
    let server = TestServer::start(&TOKENS).await;
    Doctor::new(&server.base.replace("http:", "https:")).examine().await.finds(&[("tls", "listen 443 ssl;")]);
}

#[tokio::test]
async fn tokens_that_open_nothing_or_too_much() {
    let front = front(Kind::Nginx, &[], &[]).await;
    let [(_, app), (_, claw)] = TOKENS;
    for (set_app, set_claw, expected) in [
        ("canary-wrong", claw, &[("app_token", "OPENCLAW_PROXY_APP_TOKEN=")][..]),
        (app, "canary-wrong", &[("openclaw_token", "--openclaw-token-file")]),
        ("", claw, &[("app_token", "--app-token-file")]),
        (claw, app, &[("tokens_apart", "exchange the two")]),
    ] {
        let doctor = Doctor::before(&front, "localhost", "").set("APP_TOKEN", set_app).set("OPENCLAW_TOKEN", set_claw);
        doctor.examine().await.finds(expected);
    }
    // From files, which win over the environment.
    let files = [("app", app), ("claw", claw)].map(|(name, token)| {
        let file = front.folder.join(name);
        std::fs::write(&file, format!("{token}\n")).unwrap();
        file.to_str().unwrap().to_owned()
    });
    let doctor = Doctor::before(&front, "localhost", "").set("APP_TOKEN", "x").set("OPENCLAW_TOKEN", "y");
    doctor.with(&["--app-token-file", &files[0], "--openclaw-token-file", &files[1]]).examine().await.finds_nothing();
}

#[tokio::test]
async fn a_proxy_with_one_token_for_all_or_with_none() {
    let same = front(Kind::Nginx, &[("OPENCLAW_TOKEN", TOKENS[0].1)], &[]).await;
    let doctor = Doctor::before(&same, "localhost", "").set("OPENCLAW_TOKEN", TOKENS[0].1);
    doctor.examine().await.finds(&[("tokens_apart", "OPENCLAW_PROXY_OPENCLAW_TOKEN=<another one")]);

    let open = Front::launch(Kind::Caddy, &[("APP_TOKEN", ""), ("OPENCLAW_TOKEN", "")], &[], &Paper::default()).await;
    until(async || TcpStream::connect(("127.0.0.1", open.tls_port)).await.is_ok()).await;
    Doctor::before(&open, "localhost", "").examine().await.finds(&[("no_token", "OPENCLAW_PROXY_APP_TOKEN=")]);
}

#[tokio::test]
async fn a_redirect_to_https() {
    let port = free_port().await;
    let redirecting = format!(
        "server {{ listen 127.0.0.1:{port}; return 301 https://$host$request_uri; }}\nserver {{\n    listen 443 ssl;"
    );
    let _front = front(Kind::Nginx, &[], &[("server {\n    listen 443 ssl;", &redirecting)]).await;
    let verdict = Doctor::new(&format!("http://127.0.0.1:{port}")).examine().await;
    verdict.finds(&[("path", "OPENCLAW_PROXY_PUBLIC_URL=https://127.0.0.1")]);
}

#[tokio::test]
async fn a_redirect_of_slashes() {
    let line = format!("    rewrite ^/(.*)/$ /$1 permanent;\n{NGINX_LOCATION}");
    broken(Kind::Nginx, &[(NGINX_LOCATION, &line)], &[("trailing_slash", "remove the return 301, rewrite")]).await;
}

#[tokio::test]
async fn a_path_prefix_that_is_taken_off_wrongly_and_rightly() {
    let prefixed =
        |target: &str| format!("    location /lend/ {{\n        proxy_pass http://openclaw_mcp_proxy{target};\n");
    let wrong = front(Kind::Nginx, &[], &[(NGINX_LOCATION, &prefixed(""))]).await;
    let verdict = Doctor::before(&wrong, "localhost", "/lend").examine().await;
    verdict.finds(&[("path", "location /lend/ { proxy_pass http://openclaw_mcp_proxy/; }")]);
    Doctor::before(&wrong, "localhost", "").examine().await.finds(&[("path", "location / {")]);

    let nowhere = front(Kind::Nginx, &[], &[(NGINX_LOCATION, &prefixed("/"))]).await;
    let verdict = Doctor::before(&nowhere, "localhost", "/lend/").examine().await;
    let url = format!("https://localhost:{}/lend", nowhere.tls_port);
    verdict.finds(&[("public_urls", &format!("OPENCLAW_PROXY_PUBLIC_URL={url}"))]);
}

#[tokio::test]
async fn a_front_without_a_proxy_behind_it() {
    for (kind, line) in [
        (Kind::Nginx, "server 127.0.0.1:8000;"),
        (Kind::Haproxy, "server proxy 127.0.0.1:8000"),
        (Kind::Caddy, "reverse_proxy 127.0.0.1:8000"),
    ] {
        let front = front(kind, &[], &[]).await;
        front.server.begin_stop();
        until(async || TcpStream::connect(("127.0.0.1", front.server.port)).await.is_err()).await;
        Doctor::before(&front, "localhost", "").examine().await.finds(&[("health", line)]);
    }
}

#[tokio::test]
async fn fronts_that_keep_quiet_about_a_client_that_is_gone() {
    let line = nginx("proxy_ignore_client_abort on;");
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &[("cancel", "proxy_ignore_client_abort off;")]).await;
    broken(Kind::Haproxy, &[("    option abortonclose\n", "")], &[("cancel", "option abortonclose")]).await;
    let line = format!("{CADDY_FORWARDED}\t\tflush_interval -1\n");
    broken(Kind::Caddy, &[(CADDY_FORWARDED, &line)], &[("cancel", "flush_interval -1")]).await;
}

#[tokio::test]
async fn a_clock_that_is_off_by_an_hour() {
    let line = haproxy("http-response set-header Date %[date(3600),http_date]");
    broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &line)], &[("clock", "timedatectl set-ntp true")]).await;
}

#[tokio::test]
async fn fronts_that_double_headers() {
    for (line, fix) in [
        ("http-request add-header Content-Type application/json", "http-request set-header content-type"),
        ("http-request add-header Authorization \"Bearer x\"", "proxy_set_header authorization $http_authorization;"),
        ("http-response add-header Date %[date,http_date]", "http-request set-header date"),
    ] {
        broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &haproxy(line))], &[("doubled_headers", fix)]).await;
    }
}

#[tokio::test]
async fn fronts_that_let_any_web_page_in() {
    let line = nginx("proxy_set_header Origin \"\";");
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &[("origin", "remove 'proxy_set_header Origin'")]).await;
    let line = nginx("add_header Access-Control-Allow-Origin * always;");
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &[("origin", "remove 'add_header Access-Control-Allow-Origin'")])
        .await;
}

#[tokio::test]
async fn nginx_that_lets_only_get_and_post_through() {
    let changes = [(
        "        proxy_buffering off;\n",
        "        proxy_buffering off;\n        limit_except GET POST { deny all; }\n",
    )];
    broken(Kind::Nginx, &changes, &[("methods", "limit_except GET POST PUT DELETE OPTIONS")]).await;
}

#[tokio::test]
async fn a_front_that_rewrites_bodies() {
    let line = nginx(
        "sub_filter 123456789012345678901234567890 1.2345678901234568e29; sub_filter_once off; sub_filter_types application/json;",
    );
    broken(Kind::Nginx, &[(NGINX_FORWARDED, &line)], &[("unchanged", "sub_filter")]).await;
}

#[tokio::test]
async fn a_front_that_takes_a_browsers_token_away() {
    let line = haproxy("http-request del-header Sec-WebSocket-Protocol");
    broken(Kind::Haproxy, &[(HAPROXY_FORWARDED, &line)], &[("browser_bridge", "del-header Sec-WebSocket-Protocol")])
        .await;
}

#[tokio::test]
async fn a_name_or_a_port_behind_which_there_is_nobody() {
    Doctor::new("https://nobody.invalid").examine().await.finds(&[("dns", "nobody.invalid. A ")]);
    let url = format!("https://127.0.0.1:{}", free_port().await);
    Doctor::new(&url).examine().await.finds(&[("tcp", "bind :")]);
}

#[tokio::test]
async fn bad_arguments_are_one_sentence_and_78() {
    for (arguments, says) in [
        (&["--url", "ftp://x"][..], "http(s)://host"),
        (&["--url", "https://x/v1/mcp"], "without /v1"),
        (&["--idle", "1000"], "--idle must be from 0 to 110"),
        (&["--app-token-file", "/nonexistent/file"], "/nonexistent/file is not usable"),
    ] {
        let mut command = Command::new(PROGRAM);
        command.current_dir(env!("CARGO_TARGET_TMPDIR")).env_clear().arg("doctor").args(arguments);
        let output = command.output().await.unwrap();
        assert_eq!(output.status.code(), Some(78), "{arguments:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.lines().count() == 1 && stderr.contains(says), "{stderr}");
    }
}

#[tokio::test]
async fn people_read_a_line_for_each_check_and_the_lines_that_mend() {
    let front = front(Kind::Nginx, &[], &[("client_max_body_size 16m;", "client_max_body_size 1m;")]).await;
    let mut doctor = Doctor::before(&front, "localhost", "");
    let mut command = Command::new(PROGRAM);
    command.args(["doctor", "--url", &format!("https://localhost:{}", front.tls_port)]);
    for (name, value) in doctor.command.as_std().get_envs() {
        command.env(name, value.unwrap());
    }
    doctor.command = command;
    let text = doctor.examine().await.text;
    let line = text.lines().position(|line| line.starts_with("problem  body_size")).expect(&text);
    assert!(text.lines().nth(line + 1).unwrap().trim_start().starts_with("nginx: client_max_body_size 16m;"), "{text}");
    assert!(text.ends_with("1 problem, 0 warnings.\n") && text.contains("ok       tls "), "{text}");
}
