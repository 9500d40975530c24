//! Notifications and the position, asked of a desktop's services on a private D-Bus.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use openclaw_mcp_proxy::node::capabilities::system::System;
use openclaw_mcp_proxy::node::capabilities::{Args, Capability, Request, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use zbus::Connection;
use zbus::connection::Builder;

use crate::support::{soon, until};

/// A bus with a service that python-dbusmock stands for, and that logs what is asked of it.
struct Desktop {
    address: String,
    log: std::path::PathBuf,
    control: Connection,
    processes: Vec<Child>,
}

impl Desktop {
    /// Starts a bus, and on it `mock`: the arguments of python-dbusmock that name the service.
    async fn start(name: &str, mock: &[&str]) -> Self {
        let log = std::env::temp_dir().join(format!("openclaw-{name}-{}.log", std::process::id()));
        let mut bus = Command::new("dbus-daemon")
            .args(["--session", "--nofork", "--nosyslog", "--print-address=1"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("dbus-daemon starts; install the package dbus-daemon");
        let mut address = String::new();
        BufReader::new(bus.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let address = address.trim().to_owned();
        let service = Command::new("/usr/bin/python3")
            .args(["-m", "dbusmock", "--session", "--logfile"])
            .arg(&log)
            .args(mock)
            .env("DBUS_SESSION_BUS_ADDRESS", &address)
            .spawn()
            .expect("Python starts; install the package python3-dbusmock");
        let control = Builder::address(&*address).build().await.unwrap();
        Desktop { address, log, control, processes: vec![bus, service] }
    }

    /// Waits until somebody has the name.
    async fn has(&self, service: &str) {
        until(async || {
            let bus = "org.freedesktop.DBus";
            let owned = self.control.call_method(Some(bus), "/", Some(bus), "NameHasOwner", &service).await.unwrap();
            owned.body().deserialize::<bool>().unwrap()
        })
        .await;
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Desktop {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ended = process.kill();
            let _reaped = process.wait();
        }
        let _removed = std::fs::remove_file(&self.log);
    }
}

async fn call(capability: &impl Capability, command: &str, args: Value) -> Response {
    let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
    soon(capability.execute(request, CancellationToken::new())).await
}

#[tokio::test]
async fn a_notification_reaches_the_desktop_as_it_was_said() {
    const SERVICE: &str = "org.freedesktop.Notifications";
    let desktop = Desktop::start("notify", &["--template", "notification_daemon"]).await;
    desktop.has(SERVICE).await;
    let system = System { session_bus: Some(desktop.address.clone()) };
    let title = "it's \"done\"";
    for (args, logged) in [
        (
            json!({ "title": title, "subtitle": "a", "body": "--help\n$(b)\0", "sound": false }),
            r#" Notify "OpenClaw" 0 "" "it's "done"" "a|--help|$(b)" [] {"suppress-sound": True} -1|"#,
        ),
        (json!({}), r#" Notify "OpenClaw" 0 "" "OpenClaw" "" [] {"sound-name": "message-new-instant"} -1|"#),
    ] {
        assert_eq!(call(&system, "system.notify", args).await, Response::done(json!({ "sent": true })));
        let log = desktop.log().replace('\n', "|");
        assert!(log.ends_with(logged), "{log}");
    }
}
