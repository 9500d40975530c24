//! The samples of deploy/ for machines that are not here: compose, Kubernetes, and the node on other systems. Each goes
//! through the program that would read it there, or what checks for it, and what it asks of the proxy is true.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use openclaw_mcp_proxy::proxy::config::Config;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::clients::clients_dir;
use crate::support::{TestServer, http, send, soon};

fn sample(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name)
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("deploy-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left_behind = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a program that tests/run has installed, with `input`.
async fn run(program: &str, arguments: &[&str], input: &str) -> Output {
    let path = clients_dir().join(program);
    let mut command = Command::new(&path);
    // Nobody's own settings matter.
    command
        .args(arguments)
        .env_clear()
        .env("HOME", env!("CARGO_TARGET_TMPDIR"))
        .env("PATH", std::env::var_os("PATH").unwrap())
        .kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| {
        panic!("{} cannot be started: {error}; run tests/run, which installs it", path.display())
    });
    let mut stdin = child.stdin.take().unwrap();
    // A program that reads nothing may have ended by now.
    let _unread = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    soon(child.wait_with_output()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn said(output: Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The settings that a sample gives, as the proxy takes them. None is misspelt.
fn config(environment: &BTreeMap<String, String>) -> Config {
    let config = Config::from_pairs(environment.clone()).unwrap();
    assert!(!config.warnings().iter().any(|warning| warning.contains("no such setting")), "{environment:?}");
    config
}

const TOKENS: [(&str, &str); 2] =
    [("OPENCLAW_PROXY_APP_TOKEN", "0123456789abcdef-app"), ("OPENCLAW_PROXY_OPENCLAW_TOKEN", "0123456789abcdef-claw")];

/// How long a stopped proxy may take: calls, then bridges.
fn seconds_to_stop(config: &Config) -> u64 {
    config.drain.0.as_secs() + 5
}

async fn compose(env_file: &str) -> Output {
    let folder = Folder::new();
    let file = folder.write("compose.yaml", &std::fs::read_to_string(sample("compose.yaml")).unwrap());
    folder.write(".env", env_file);
    run("compose/bin/docker-compose", &["-f", file.to_str().unwrap(), "config", "--format", "json"], "").await
}

#[tokio::test]
async fn compose_reads_its_file_and_says_what_is_missing() {
    let env =
        |names: &[&str]| names.iter().map(|name| format!("{name}=0123456789abcdef.example\n")).collect::<String>();
    let needed = ["OPENCLAW_HOST", "OPENCLAW_PROXY_APP_TOKEN", "OPENCLAW_PROXY_OPENCLAW_TOKEN"];
    for missing in needed {
        let others: Vec<_> = needed.into_iter().filter(|name| *name != missing).collect();
        let output = compose(&env(&others)).await;
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains(missing) && stderr.contains("deploy/.env"), "{stderr}");
    }
    let further =
        "OPENCLAW_BUILD_COMMIT=0123abc\nOPENCLAW_PROXY_LISTEN=127.0.0.1:1\nOPENCLAW_PROXY_TOOL_TIMEOUT_SECONDS=60\n";
    let services: Value = serde_json::from_str(&said(compose(&(env(&needed) + further)).await)).unwrap();
    let proxy = &services["services"]["proxy"];
    assert_eq!(proxy["build"]["args"], json!({ "OPENCLAW_BUILD_COMMIT": "0123abc" }));
    let mut environment: BTreeMap<String, String> = serde_json::from_value(proxy["environment"].clone()).unwrap();
    assert_eq!(environment.remove("OPENCLAW_HOST").unwrap(), "0123456789abcdef.example");
    assert_eq!(environment.remove("OPENCLAW_BUILD_COMMIT").unwrap(), "0123abc");
    let config = config(&environment);
    assert_eq!(config.listen.to_string(), "0.0.0.0:8000", "Caddy must reach it");
    assert_eq!(config.public_url.as_ref().unwrap().base, "https://0123456789abcdef.example");
    assert_eq!(config.tool_timeout.0.as_secs(), 60, "further settings are passed on");
    let grace = proxy["stop_grace_period"].as_str().unwrap().trim_end_matches('s').parse::<u64>().unwrap();
    assert!(grace > seconds_to_stop(&config));
    assert!(proxy["ulimits"]["nofile"].as_u64().unwrap() as usize > config.max_connections);
    assert!(proxy["read_only"] == true && proxy["cap_drop"] == json!(["ALL"]) && proxy["ports"].is_null(), "{proxy}");
    assert_eq!(proxy["healthcheck"]["test"], json!(["CMD", "/usr/local/bin/openclaw-mcp-proxy", "health"]));
    let caddy = &services["services"]["caddy"];
    assert_eq!(caddy["environment"]["OPENCLAW_UPSTREAM"], "proxy:8000");
    assert_eq!(caddy["depends_on"]["proxy"]["condition"], "service_healthy");
}

async fn helm(arguments: &[&str], values: &Value) -> Output {
    let folder = Folder::new();
    let values = folder.write("values.json", &values.to_string());
    let chart = sample("helm/openclaw-mcp-proxy");
    let mut all = arguments.to_vec();
    all.extend([chart.to_str().unwrap(), "--values", values.to_str().unwrap()]);
    run("helm/layer/helm/helm", &all, "").await
}

/// What the chart makes of these values, by kind. Each is what Kubernetes takes, to the last member.
async fn rendered(values: &Value) -> BTreeMap<String, Value> {
    said(helm(&["lint", "--strict"], values).await);
    let manifests = said(helm(&["template", "release"], values).await);
    let folder = Folder::new();
    let file = folder.write("manifests.yaml", &manifests);
    said(run("kubernetes/bin/kubernetes-validate", &["--strict", file.to_str().unwrap()], "").await);
    let to_json = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))";
    let list = said(run("kubernetes/bin/python", &["-c", to_json], &manifests).await);
    let list: Vec<Value> = serde_json::from_str(&list).unwrap();
    list.into_iter().map(|manifest| (manifest["kind"].as_str().unwrap().to_owned(), manifest)).collect()
}

fn least_values() -> Value {
    json!({ "host": "mcp.example.com", "existingSecret": "tokens", "image": { "repository": "registry.example/proxy" } })
}

#[tokio::test]
async fn the_chart_makes_what_kubernetes_takes_and_the_proxy_understands() {
    let mut full = least_values();
    full["settings"] =
        json!({ "TOOL_TIMEOUT_SECONDS": "60", "MAX_REQUEST_BYTES": "536870912", "TRUSTED_PROXIES": "10.42.0.0/16" });
    full["settings"]["OTEL_EXPORTER_OTLP_ENDPOINT"] = json!("http://collector:4318");
    full["tenants"] = json!({ "secret": "tenants" });
    full["ingress"] = json!({ "annotations": { "nginx.ingress.kubernetes.io/proxy-read-timeout": "99" } });
    full["imagePullSecrets"] = json!([{ "name": "pull" }]);
    full["podAnnotations"] = json!({ "a": "b" });
    full["nodeSelector"] = json!({ "disk": "ssd" });
    full["tolerations"] = json!([{ "key": "k", "operator": "Exists" }]);
    for values in [least_values(), full] {
        let manifests = rendered(&values).await;
        let kinds: Vec<_> = manifests.keys().map(String::as_str).collect();
        assert_eq!(kinds, ["Deployment", "Ingress", "PodDisruptionBudget", "Service"]);
        let spec = &manifests["Deployment"]["spec"];
        assert!(spec["replicas"] == 1 && spec["strategy"]["type"] == "Recreate", "{spec}");
        let pod = &spec["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["envFrom"], json!([{ "secretRef": { "name": "tokens" } }]));
        let named = |entry: &Value| ["name", "value"].map(|member| entry[member].as_str().unwrap().to_owned());
        let given = container["env"].as_array().unwrap().iter().map(named).map(|[name, value]| (name, value));
        let secret = TOKENS.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let environment = secret.into_iter().chain(given).collect();
        let config = config(&environment);
        assert_eq!(config.public_url.as_ref().unwrap().base, "https://mcp.example.com");
        assert_eq!(config.tool_timeout.0.as_secs(), if values["settings"].is_null() { 120 } else { 60 });
        assert_eq!(config.tracing.is_some(), !values["settings"].is_null());
        assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > seconds_to_stop(&config));
        if let Some(file) = &config.tenants_file {
            assert!(file.starts_with(container["volumeMounts"][0]["mountPath"].as_str().unwrap()));
            assert_eq!(pod["volumes"][0]["secret"]["secretName"], "tenants");
        }
        // The Service's pods are those of the Deployment, and its port is the one that is listened on.
        let port = config.listen.tcp().unwrap().port();
        assert_eq!(container["ports"][0], json!({ "name": "http", "containerPort": port }));
        let labels = spec["template"]["metadata"]["labels"].as_object().unwrap();
        let selector = manifests["Service"]["spec"]["selector"].as_object().unwrap();
        assert!(!selector.is_empty() && selector.iter().all(|(name, value)| labels.get(name) == Some(value)));
        assert_eq!(spec["selector"]["matchLabels"], Value::Object(selector.clone()));
        assert_eq!(manifests["PodDisruptionBudget"]["spec"]["selector"], spec["selector"]);
        let backend = &manifests["Ingress"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"];
        assert_eq!(backend["name"], manifests["Service"]["metadata"]["name"]);
        // The probes ask for the pod's address, whatever Host is served to others.
        let server = TestServer::start(&[("PUBLIC_URL", "https://mcp.example.com")]).await;
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let path = container[probe]["httpGet"]["path"].as_str().unwrap();
            let asked = http().get(format!("{}{path}", server.base)).header("host", "10.42.0.7:8000");
            assert_eq!(send(asked).await.status, 200, "{probe}");
        }
        // As much is granted as in nginx's own sample, unless the operator knows better.
        let annotations = &manifests["Ingress"]["metadata"]["annotations"];
        let nginx = std::fs::read_to_string(sample("nginx.conf")).unwrap();
        for (annotation, directive, unit) in [
            ("proxy-body-size", "client_max_body_size", ""),
            ("client-body-buffer-size", "client_body_buffer_size", ""),
            ("proxy-buffering", "proxy_buffering", ""),
            ("proxy-connect-timeout", "proxy_connect_timeout", "s"),
            ("proxy-read-timeout", "proxy_read_timeout", "s"),
            ("proxy-send-timeout", "proxy_send_timeout", "s"),
        ] {
            let name = format!("nginx.ingress.kubernetes.io/{annotation}");
            let value = annotations[&name].as_str().unwrap();
            if values["ingress"]["annotations"][&name].is_string() {
                assert_eq!(value, "99");
            } else {
                assert!(nginx.contains(&format!(" {directive} {value}{unit};")), "{name}: {value}");
            }
        }
    }
    let mut without = least_values();
    without["ingress"] = json!({ "enabled": false });
    assert!(!rendered(&without).await.contains_key("Ingress"));
    without["ingress"] = json!({ "className": "traefik" });
    assert!(rendered(&without).await["Ingress"]["metadata"]["annotations"].is_null());
}

#[tokio::test]
async fn the_chart_refuses_what_cannot_work() {
    for (pointer, value, says) in [
        ("/host", json!(""), "/host"),
        ("/host", json!("https://mcp.example.com/x"), "/host"),
        ("/existingSecret", json!(""), "/existingSecret"),
        ("/image/repository", json!(""), "/image/repository"),
        ("/settings", json!({ "APP_TOKEN": "everybody would see it" }), "APP_TOKEN"),
        ("/settings", json!({ "LISTEN": "127.0.0.1:8000" }), "LISTEN"),
        ("/settings", json!({ "OTEL_EXPORTER_OTLP_HEADERS": "a=secret" }), "OTLP_HEADERS"),
        ("/settings", json!({ "MAX_REQUEST_BYTES": 536870912 }), "/settings/MAX_REQUEST_BYTES"),
        ("/tenants", json!({ "secret": "a", "configMap": "b" }), "/tenants"),
        ("/replicas", json!(2), "replicas"),
    ] {
        let mut values = least_values();
        match values.pointer_mut(pointer) {
            Some(place) => *place = value.clone(),
            None => values[&pointer[1..]] = value.clone(),
        }
        let output = helm(&["template", "release"], &values).await;
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains(says), "{pointer} {value}: {stderr}");
    }
}

#[tokio::test]
async fn launchd_gets_a_property_list_that_starts_the_node() {
    let read = "import json, plistlib, sys; print(json.dumps(plistlib.loads(sys.stdin.buffer.read())))";
    let list = std::fs::read_to_string(sample("node/com.openclaw.node.plist")).unwrap();
    let list: Value = serde_json::from_str(&said(run("kubernetes/bin/python", &["-c", read], &list).await)).unwrap();
    assert_eq!(list["Label"], "com.openclaw.node", "the name of the file");
    assert_eq!(list["ProgramArguments"], json!(["/usr/local/bin/openclaw-node", "serve"]));
    assert_eq!(list["KeepAlive"], json!({ "SuccessfulExit": false }));
    let known = include_str!("../.env.example");
    let variables = list["EnvironmentVariables"].as_object().unwrap().keys();
    assert!(variables.filter(|name| *name != "PATH").all(|name| known.contains(&format!("{name}="))));
}

#[tokio::test]
async fn the_units_of_the_users_own_systemd_are_understood() {
    let folder = Folder::new();
    let unit = std::fs::read_to_string(sample("node/openclaw-node.service")).unwrap();
    assert_eq!(unit.matches("/usr/local/bin/openclaw-node serve\n").count(), 1);
    let program = format!("{} serve\n", env!("CARGO_BIN_EXE_openclaw-node"));
    let unit = folder.write("openclaw-node.service", &unit.replace("/usr/local/bin/openclaw-node serve\n", &program));
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--user", "--man=no", unit.to_str().unwrap()]).env("XDG_RUNTIME_DIR", &folder.0);
    let output = soon(command.kill_on_drop(true).output()).await;
    let output = output.expect("systemd-analyze is there; install it: apt-get install systemd");
    assert_eq!(text(&output.stdout) + &text(&output.stderr), "");
}
