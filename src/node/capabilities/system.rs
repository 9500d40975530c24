//! `system.*`: notifications, and finding programs.

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

#[cfg(all(unix, not(target_os = "macos")))]
use super::dbus;
use super::program::find;
use super::{Args, Capability, Request, Response};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 2] = ["system.notify", "system.which"];
/// The title of a notification that has none.
const DEFAULT_TITLE: &str = "OpenClaw";
/// How long the desktop may take to show a notification.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// The capability.
#[derive(Debug, Default)]
pub struct System {
    /// The address of the D-Bus session bus, if it is not the user's own.
    pub session_bus: Option<String>,
}

impl Capability for System {
    fn category(&self) -> &str {
        "system"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        Some(match command {
            "system.notify" => json!({
                "type": "object",
                "properties": {
                    "title": { "type": "string", "default": DEFAULT_TITLE },
                    "body": { "type": "string", "default": "" },
                    "subtitle": { "type": "string" },
                    "sound": { "type": "boolean", "default": true },
                },
                "additionalProperties": true,
            }),
            "system.which" => json!({
                "type": "object",
                "properties": {
                    "bins": { "type": "array", "items": { "type": "string" }, "description": "Bare names, such as git" },
                },
                "required": ["bins"],
                "additionalProperties": true,
            }),
            _ => return None,
        })
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "system.notify" => notify(self.session_bus.as_deref(), &request.args, &cancel).await,
                "system.which" => which(&request.args),
                other => Response::unknown_command(other),
            }
        })
    }
}

/// Shows a notification if the desktop has a way to. That it was asked to is all that is promised.
async fn notify(bus: Option<&str>, args: &Args, cancel: &CancellationToken) -> Response {
    let title = args.string("title").unwrap_or(DEFAULT_TITLE);
    let parts = [args.string("subtitle"), args.string("body")];
    let body = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n");
    let sound = args.bool("sound").unwrap_or(true);
    let shown = tokio::time::timeout(NOTIFY_TIMEOUT, show(bus, title, &body, sound));
    match cancel.run_until_cancelled(shown).await {
        Some(Ok(Ok(()))) => {}
        Some(Ok(Err(error))) => tracing::debug!(error, "the notification cannot be shown"),
        Some(Err(_)) => tracing::debug!("the desktop does not answer; the notification may not be shown"),
        None => tracing::debug!("the notification was cancelled"),
    }
    Response::done(json!({ "sent": true }))
}

#[cfg(all(unix, not(target_os = "macos")))]
async fn show(bus: Option<&str>, title: &str, body: &str, sound: bool) -> Result<(), String> {
    const SERVICE: &str = "org.freedesktop.Notifications";
    const PATH: &str = "/org/freedesktop/Notifications";
    // D-Bus knows no NUL.
    let [title, body] = [title, body].map(|text| text.replace('\0', ""));
    let (hint, value) = match sound {
        true => ("sound-name", zbus::Variant::from("message-new-instant")),
        false => ("suppress-sound", zbus::Variant::from(true)),
    };
    let hints = std::collections::HashMap::from([(hint, value)]);
    let no_actions: [&str; 0] = [];
    let notification = ("OpenClaw", 0_u32, "", title, body, &no_actions[..], hints, -1_i32);
    let told = async {
        let desktop = dbus::session(bus).await?;
        desktop.call_method(Some(SERVICE), PATH, Some(SERVICE), "Notify", &notification).await
    };
    told.await.map(drop).map_err(|error: zbus::Error| error.to_string())
}

/// What is to be shown is passed as arguments, never as a script.
#[cfg(target_os = "macos")]
async fn show(_: Option<&str>, title: &str, body: &str, sound: bool) -> Result<(), String> {
    let show = "display notification (item 2 of argv) with title (item 1 of argv)";
    let sound = if sound { " sound name \"default\"" } else { "" };
    let mut command = tokio::process::Command::new("/usr/bin/osascript");
    command.args(["-e", &format!("on run argv\n{show}{sound}\nend run"), "--", title, body]).kill_on_drop(true);
    command.output().await.map(drop).map_err(|error| error.to_string())
}

#[cfg(windows)]
async fn show(_: Option<&str>, _: &str, _: &str, _: bool) -> Result<(), String> {
    Err("no way to show notifications on Windows is known".to_owned())
}

/// Says where programs are that are looked for by their bare names.
fn which(args: &Args) -> Response {
    let names = args.strings("bins");
    if names.is_empty() {
        return Response::failed("Missing bins parameter");
    }
    let found = names.into_iter().filter_map(|name| Some((name.to_owned(), find(name)?.display().to_string().into())));
    Response::done(json!({ "bins": found.collect::<Map<String, Value>>() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(command: &str, args: Value) -> Response {
        let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
        System::default().execute(request, CancellationToken::new()).await
    }

    #[tokio::test]
    async fn names_must_be_given() {
        for args in
            [Value::Null, json!({}), json!({ "bins": [] }), json!({ "bins": "git" }), json!({ "bins": [" ", 1] })]
        {
            assert_eq!(run("system.which", args).await, Response::failed("Missing bins parameter"));
        }
        assert_eq!(run("system.other", Value::Null).await, Response::failed("Unknown command: system.other"));
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn what_is_found_is_told_and_the_rest_left_out() {
        let args = json!({ "bins": [" sh ", "no-such-program", "/bin/sh", "bin/sh", "..", "a\\b"] });
        let Response::Done { payload, .. } = run("system.which", args).await else { panic!() };
        let bins = payload["bins"].as_object().unwrap();
        assert_eq!(bins.keys().collect::<Vec<_>>(), ["sh"]);
        assert!(bins["sh"].as_str().unwrap().ends_with("/sh"));
    }

    #[tokio::test]
    async fn a_notification_is_always_sent() {
        let system = System { session_bus: Some("unix:path=/no/such/bus".to_owned()) };
        for args in [Value::Null, json!({ "title": "--help", "body": "b", "subtitle": "s", "sound": false })] {
            let request = Request { command: "system.notify".to_owned(), args: Args::new(args), session_key: None };
            let sent = system.execute(request, CancellationToken::new()).await;
            assert_eq!(sent, Response::done(json!({ "sent": true })));
        }
    }
}
