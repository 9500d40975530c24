//! Networks that swallow everything: no RST, no FIN, nothing comes back. With two hosts that network namespaces of
//! Linux make, a cable between them, and a packet filter on it.
//!
//! Each test runs itself again, in a namespace of its own, so that whatever happens nothing of it is left behind.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio_tungstenite::MaybeTlsStream;

use crate::program::{PROGRAM, program_by, serve};
use crate::support::{App, Bridge, McpClient, soon, timed, tools, until};

/// Set for a test that has a namespace of its own.
const INSIDE: &str = "OPENCLAW_PROXY_TEST_INSIDE";
/// What a namespace needs to be a network with one more host, called "proxy".
const PREPARE: &str = "
    set -e
    mount -t tmpfs none /run
    ip link set lo up
    ip netns add proxy
    ip link add cable type veth peer name cable netns proxy
    ip address add 10.77.0.1/24 dev cable
    ip link set cable up
    ip -n proxy address add 10.77.0.2/24 dev cable
    ip -n proxy link set cable up
    nft add table inet hole
    nft add chain inet hole in '{ type filter hook input priority 0; }'
    nft add chain inet hole out '{ type filter hook output priority 0; }'
    exec \"$@\"";

/// Runs a test, which is called `name`, in a network of its own.
fn in_a_network(name: &str, test: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(test);
    }
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let unshare = |as_root: &[&str], command: &[&str]| {
        std::process::Command::new("unshare")
            .args(as_root)
            .args(["--net", "--mount", "--kill-child", "sh", "-c", PREPARE, "sh"])
            .args(command)
            .env("PATH", &path)
            .env(INSIDE, "")
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("cannot start unshare, of the package util-linux: {error}"))
    };
    // Root may do it as it is; everybody else is root in a namespace of users, which some systems forbid.
    let mut errors = Vec::new();
    let as_root = [&[][..], &["--user", "--map-root-user"]].into_iter().find(|as_root| {
        let tried = unshare(as_root, &["true"]);
        errors.extend(tried.stderr);
        tried.status.success()
    });
    let as_root = as_root.unwrap_or_else(|| {
        panic!(
            "this test makes network namespaces: it needs root, or a Linux that lets everybody run 'unshare --user --net', \
             and the packages iproute2 and nftables\n{}",
            String::from_utf8_lossy(&errors)
        )
    });
    let own = std::env::current_exe().unwrap();
    let output = unshare(as_root, &[own.to_str().unwrap(), "--exact", name, "--nocapture", "--include-ignored"]);
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    eprint!("{}", said(&output.stderr));
    let stdout = said(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
}

/// Starts the program on the other host.
async fn proxy(settings: &[(&str, &str)]) -> (Child, String) {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", "proxy", PROGRAM]);
    let own = [("LISTEN", "10.77.0.2:8000"), ("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")];
    serve(program_by(command, &[&own[..], settings].concat())).await
}

async fn register(base: &str, features: Value) -> App {
    let registration = json!({ "device_id": "d", "tools": tools(&["echo", "slow"]), "bridge_features": features });
    App::register_at_as(base, registration, "app-token").await
}

fn client(app: &App) -> McpClient {
    app.client().header("authorization", "Bearer claw-token")
}

/// From now on nothing of this bridge's socket gets through, in either direction.
async fn blackhole(bridge: &Bridge) {
    let MaybeTlsStream::Plain(stream) = bridge.socket.get_ref() else { panic!("it is a plain socket") };
    let port = stream.local_addr().unwrap().port();
    for (chain, end) in [("in", "dport"), ("out", "sport")] {
        let rule = format!("add rule inet hole {chain} tcp {end} {port} drop");
        assert!(Command::new("nft").arg(rule).status().await.unwrap().success());
    }
}

async fn hello(bridge: &mut Bridge) -> Value {
    let frame = bridge.recv().await;
    assert_eq!(frame["type"], "hello", "{frame}");
    frame
}

#[test]
fn a_bridge_in_a_black_hole_is_found_dead_and_its_calls_end() {
    in_a_network("netns::a_bridge_in_a_black_hole_is_found_dead_and_its_calls_end", async {
        let settings = [("PING_SECONDS", "1"), ("RESUME_GRACE_SECONDS", "1")];
        let (_proxy, base) = proxy(&settings).await;
        let plain = register(&base, json!([])).await;
        let resuming = register(&base, json!(["resume"])).await;
        let mut bridges = [plain.connect().await, resuming.connect().await];
        hello(&mut bridges[1]).await;
        let mut calls = Vec::new();
        for (app, bridge) in [&plain, &resuming].into_iter().zip(&mut bridges) {
            calls.push(client(app).spawn_call("1", "slow", "{}"));
            bridge.invoked().await;
        }
        for bridge in &bridges {
            blackhole(bridge).await;
        }
        let hole = Instant::now();
        let lost = async { (soon(calls.remove(0)).await.unwrap().tool_text(), hole.elapsed()) };
        let parked = async {
            resuming.wait_connected(false).await;
            hole.elapsed()
        };
        let ((lost, ended), parked) = tokio::join!(lost, parked);
        assert_eq!(lost, "Bridge disconnected before the tool answered.");
        assert!(!calls[0].is_finished());
        let given_up = soon(calls.remove(0)).await.unwrap().tool_text();
        let waited = hole.elapsed() - parked;
        eprintln!("the call ended after {ended:?}; the other one was parked after {parked:?}, for {waited:?}");
        assert!(ended < Duration::from_secs(3) && parked < Duration::from_secs(3));
        assert!(given_up.ends_with("did not come back within 1 s. The tool may have run."), "{given_up}");
        assert!(waited > Duration::from_millis(900) && waited < Duration::from_millis(1500));
    });
}

#[test]
fn an_app_that_comes_back_from_a_black_hole_is_the_bridge_within_three_seconds() {
    in_a_network("netns::an_app_that_comes_back_from_a_black_hole_is_the_bridge_within_three_seconds", async {
        let (_proxy, base) = proxy(&[]).await;
        let plain = register(&base, json!([])).await;
        let resuming = register(&base, json!(["resume"])).await;
        let mut old = [plain.connect().await, resuming.connect().await];
        hello(&mut old[1]).await;
        let lost = client(&plain).spawn_call("1", "slow", "{}");
        let kept = client(&resuming).spawn_call("1", "slow", "{}");
        old[0].invoked().await;
        let (request_id, _, _) = old[1].invoked().await;
        for bridge in &old {
            blackhole(bridge).await;
        }
        // The proxy has noticed nothing; each app has a new network.
        let (new, took) = timed(async {
            let (plain_bridge, mut resuming_bridge) = tokio::join!(plain.dial(), resuming.dial());
            let hello = hello(&mut resuming_bridge).await;
            assert_eq!((&hello["epoch"], &hello["pending"]), (&json!(2), &json!([request_id])));
            until(async || plain.status().await.json()["bridge"]["epoch"] == 2).await;
            [plain_bridge, resuming_bridge]
        })
        .await;
        eprintln!("back after {took:?}");
        assert!(took > Duration::from_millis(1900) && took < Duration::from_secs(3));
        let [plain_bridge, mut resuming_bridge] = new;
        assert_eq!(soon(lost).await.unwrap().tool_text(), "Bridge disconnected before the tool answered.");
        resuming_bridge.answer(&request_id, r#""ok":true,"content":"kept""#).await;
        assert_eq!(soon(kept).await.unwrap().tool_text(), "kept");
        plain_bridge.echo();
        resuming_bridge.echo();
        for app in [&plain, &resuming] {
            assert!(!client(app).call("echo", "{}").await.is_tool_error());
            assert_eq!(app.status().await.json()["calls_in_flight"], 0);
        }
    });
}

#[test]
fn two_live_apps_that_fight_for_a_session_make_no_storm() {
    in_a_network("netns::two_live_apps_that_fight_for_a_session_make_no_storm", async {
        const FIGHT: Duration = Duration::from_secs(10);
        let (proxy, base) = proxy(&[]).await;
        let app = register(&base, json!([])).await;
        app.connect().await.echo();
        let cpu = cpu_seconds(&proxy);
        let fight = Instant::now();
        // This one does not stop at 4409, and does not even pause.
        let rival = async {
            let mut refusals = 0;
            while fight.elapsed() < FIGHT {
                assert_eq!(app.dial().await.closed().await.0, 4409);
                refusals += 1;
            }
            refusals
        };
        let caller = async {
            let mut slowest = Duration::ZERO;
            while fight.elapsed() < FIGHT {
                let (reply, took) = timed(client(&app).call("echo", "{}")).await;
                assert!(!reply.is_tool_error(), "{}", reply.text);
                slowest = slowest.max(took);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            slowest
        };
        let (refusals, slowest) = tokio::join!(rival, caller);
        let cpu = cpu_seconds(&proxy) - cpu;
        let status = app.status().await.json();
        eprintln!("{refusals} refusals, {cpu} s of CPU, slowest call {slowest:?}");
        assert_eq!((&status["bridge"]["connected"], &status["bridge"]["epoch"]), (&json!(true), &json!(1)));
        assert!(refusals > 10 && refusals < 100);
        assert!(cpu < 1.0, "a tenth of a core");
    });
}

/// The time that a process has used.
fn cpu_seconds(process: &Child) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id().unwrap())).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap()).sum();
    ticks / 100.0
}
