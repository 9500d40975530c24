//! The alerts and the dashboard of deploy/, with a real Prometheus that scrapes a real proxy.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use regex::Regex;
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::support::{App, TestServer, free_port, http, send, soon, until};

const ALERTS: &str = include_str!("../deploy/alerts.yml");
const DASHBOARD: &str = include_str!("../deploy/grafana-dashboard.json");

/// What the dashboard asks Prometheus, with Grafana's variables set.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    let variables = [("$instance", ".*"), ("$job", ".*"), ("$__rate_interval", "5m"), ("$__range", "1h")];
    let set = |query: &str| variables.iter().fold(query.to_owned(), |query, (name, value)| query.replace(name, value));
    targets.map(|target| set(target["expr"].as_str().unwrap())).collect()
}

/// The names of metrics in a text.
fn names(text: &str) -> BTreeSet<&str> {
    let name = Regex::new(r"\b(openclaw_proxy|process)_[a-z_]+").unwrap();
    name.find_iter(text).map(|name| name.as_str()).collect()
}

async fn promtool(arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let output = soon(command.output()).await.expect("promtool is there; install it: apt-get install prometheus");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn whatever_the_alerts_and_the_dashboard_name_is_there() {
    let server = TestServer::start(&[("ADMIN_LISTEN", "127.0.0.1:0")]).await;
    let metrics = send(http().get(format!("{}/metrics", server.admin.as_ref().unwrap()))).await.text;
    let samples: String = metrics.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let there = names(&samples);
    for (file, text) in [("alerts.yml", ALERTS), ("grafana-dashboard.json", DASHBOARD)] {
        let named = names(text);
        assert!(named.len() > 10, "{file}: {named:?}");
        assert_eq!(named.difference(&there).collect::<Vec<_>>(), Vec::<&&str>::new(), "{file}");
    }
    // So are the values of labels, which no query would miss.
    let matcher = Regex::new(r#"(outcome|reason|limit)(?:=|!=|=~|!~)"([a-z_|]+)""#).unwrap();
    let alerts = matcher.captures_iter(ALERTS).map(|found| found.extract::<2>().1);
    let asked = queries().join("\n");
    let values: Vec<[&str; 2]> = alerts.chain(matcher.captures_iter(&asked).map(|found| found.extract().1)).collect();
    assert!(values.len() > 4, "{values:?}");
    for [label, values] in values {
        for value in values.split('|') {
            assert!(samples.contains(&format!(r#"{label}="{value}""#)), "{label}={value}");
        }
    }
}

#[tokio::test]
async fn the_alerts_are_raised_when_something_is_wrong_and_only_then() {
    let (is_good, said) = promtool(&["check", "rules", "deploy/alerts.yml"]).await;
    assert!(is_good, "{said}");
    let (is_good, said) = promtool(&["test", "rules", "tests/alerts.yml"]).await;
    assert!(is_good, "{said}");
    let tested = include_str!("alerts.yml");
    let alerts = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    for alert in alerts {
        assert!(tested.contains(&format!("alertname=\"{alert}\"")), "{alert} is not in tests/alerts.yml");
    }
}

/// A Prometheus, with its files, which end with it.
struct Prometheus {
    base: String,
    folder: PathBuf,
    _process: Child,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _killed = self._process.start_kill();
        let _left_behind = std::fs::remove_dir_all(&self.folder);
    }
}

impl Prometheus {
    /// One that is set up as deploy/alerts.yml says.
    async fn start(admin: &str, token: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("prometheus-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        let sample: String = ALERTS.lines().filter_map(|line| line.strip_prefix("#   ")).collect::<Vec<_>>().join("\n");
        let replace = |text: String, from: &str, to: &str| {
            assert_eq!(text.matches(from).count(), 1, "{from} in the sample");
            text.replace(from, to)
        };
        let config = replace(sample, "127.0.0.1:8001", admin.trim_start_matches("http://"));
        let place = |name: &str| Path::new(&folder).join(name).display().to_string();
        let config = replace(config, "/etc/prometheus/openclaw-admin-token", &place("token"));
        let often = "global: { scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms }\n";
        file("prometheus.yml", &format!("{often}{config}\n"));
        file("alerts.yml", ALERTS);
        file("token", token);
        let port = free_port().await;
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", place("prometheus.yml")));
        command.arg(format!("--storage.tsdb.path={}", place("data")));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let log = std::fs::File::create(folder.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
        let process = command.spawn().expect("prometheus starts; install it: apt-get install prometheus");
        Prometheus { base: format!("http://127.0.0.1:{port}"), folder, _process: process }
    }

    /// What its API says.
    async fn ask(&self, path: &str) -> Option<Value> {
        let reply = http().get(format!("{}/api/v1/{path}", self.base)).send().await.ok()?;
        let text = soon(reply.text()).await.ok()?;
        serde_json::from_str(&text).ok()
    }

    async fn query(&self, query: &str) -> Value {
        let query: String = url::form_urlencoded::byte_serialize(query.as_bytes()).collect();
        self.ask(&format!("query?query={query}")).await.unwrap_or_default()
    }

    async fn value(&self, query: &str) -> Option<f64> {
        self.query(query).await["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    }
}

#[tokio::test]
async fn a_prometheus_scrapes_the_proxy_answers_the_dashboard_and_raises_an_alert() {
    let settings = [("ADMIN_LISTEN", "127.0.0.1:0"), ("ADMIN_TOKEN", "operator"), ("MAX_CALLS_PER_SESSION", "1")];
    let server = TestServer::start(&settings).await;
    let prometheus = Prometheus::start(server.admin.as_ref().unwrap(), "operator").await;
    until(async || prometheus.value(r#"up{job="openclaw-mcp-proxy"}"#).await == Some(1.0)).await;

    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let call = app.client().spawn_call("1", "echo", "{}");
    let (id, _, _) = bridge.invoked().await;
    until(async || prometheus.value("openclaw_proxy_calls_in_flight").await == Some(1.0)).await;
    app.client().call("echo", "{}").await;
    bridge.answer(&id, r#""ok":true,"content":1"#).await;
    soon(call).await.unwrap();
    let ended = r#"openclaw_proxy_calls_total{outcome="ok"}"#;
    until(async || prometheus.value(ended).await == Some(1.0)).await;

    let queries = queries();
    assert!(queries.len() > 20);
    for query in queries {
        until(async || prometheus.value(&query).await.is_some()).await;
    }
    let rules = prometheus.ask("rules").await.unwrap();
    let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() > 10 && rules.iter().all(|rule| rule["health"] == "ok"), "{rules:?}");
    let raised = async || {
        let alerts = prometheus.ask("alerts").await.unwrap();
        alerts["data"]["alerts"].as_array().unwrap().clone()
    };
    until(async || !raised().await.is_empty()).await;
    let alerts = raised().await;
    let labels: Vec<[&Value; 2]> =
        alerts.iter().map(|alert| [&alert["labels"]["alertname"], &alert["labels"]["limit"]]).collect();
    assert_eq!(labels, [["OpenClawProxyLimitMet", "max_calls_per_session"]], "{alerts:?}");
    assert!(alerts[0]["annotations"]["summary"].as_str().unwrap().contains("max_calls_per_session"));
}
