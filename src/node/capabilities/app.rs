//! `app.*`: the node about itself. Only clients on this machine get to see it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use super::{Args, Capability, Request, Response};
use crate::node::settings::{self, Settings};
use crate::node::status::{Bridge, LocalMcp, Now, Status};

/// The commands, in the order in which they are listed.
pub const COMMANDS: [&str; 4] = ["app.status", "app.settings.get", "app.connection.status", "app.connection.reconnect"];

/// The capability.
#[derive(Debug)]
pub struct App {
    status: Arc<Status>,
    settings: Settings,
}

impl App {
    /// Tells of this status and of these settings.
    pub fn new(status: Arc<Status>, settings: Settings) -> Self {
        App { status, settings }
    }

    /// A switch; without a name, all of them. What is not a switch is not told: it may be a secret.
    fn setting(&self, args: &Args) -> Response {
        let value = |name: &str| match self.settings.switch(name).ok().flatten() {
            Some(on) => Value::Bool(on),
            None if [settings::LOCAL_MCP, settings::BRIDGE].contains(&name) => Value::Null,
            None => Value::Bool(self.settings.is_enabled(name)),
        };
        match args.string("name") {
            None => {
                let all = settings::names().into_iter().map(|name| (name.to_owned(), value(name)));
                Response::done(Value::Object(all.collect::<Map<_, _>>()))
            }
            Some(name) if settings::names().contains(&name) => Response::done(value(name)),
            Some(_) => Response::done(json!({ "error": "There is no such setting, or it is not for everybody." })),
        }
    }

    fn reconnect(&self) -> Response {
        if self.status.now().bridge == Bridge::Disabled {
            return Response::done(json!({ "reconnected": false, "error": "The bridge is switched off." }));
        }
        self.status.reconnect.notify_one();
        Response::done(json!({ "reconnected": true }))
    }
}

impl Capability for App {
    fn category(&self) -> &str {
        "app"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let properties = match command {
            "app.settings.get" => json!({
                "name": { "type": "string", "enum": settings::names(), "description": "All of them, if left out" },
            }),
            _ => json!({}),
        };
        Some(json!({ "type": "object", "properties": properties, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, _: CancellationToken) -> BoxFuture<'_, Response> {
        let response = match &*request.command {
            "app.status" => Response::done(summary(&self.status.now())),
            "app.settings.get" => self.setting(&request.args),
            "app.connection.status" => Response::done(connection(&self.status.now())),
            "app.connection.reconnect" => self.reconnect(),
            other => Response::unknown_command(other),
        };
        Box::pin(std::future::ready(response))
    }
}

/// The state of the bridge in a word, and what is wrong with it.
fn bridge(now: &Now) -> (&'static str, Option<&str>) {
    match &now.bridge {
        Bridge::Disabled => ("disabled", None),
        Bridge::Connecting => ("connecting", None),
        Bridge::Connected => ("connected", None),
        Bridge::Waiting(why) => ("waiting", Some(why)),
        Bridge::Failed(why) => ("failed", Some(why)),
        Bridge::Stopped => ("stopped", None),
    }
}

/// The local MCP server's state in a word, where it listens, and what is wrong with it.
fn local_mcp(now: &Now) -> (&'static str, Option<String>, Option<&str>) {
    match &now.local_mcp {
        LocalMcp::Disabled => ("disabled", None, None),
        LocalMcp::Listening(address) => ("listening", Some(format!("http://{address}/")), None),
        LocalMcp::Failed(why) => ("failed", None, Some(why)),
        LocalMcp::Stopped => ("stopped", None, None),
    }
}

fn summary(now: &Now) -> Value {
    let (state, error) = bridge(now);
    json!({
        "connectionStatus": state,
        "nodeConnected": now.bridge == Bridge::Connected,
        "nodeError": error,
        "localMcp": local_mcp(now).0,
        "appVersion": env!("CARGO_PKG_VERSION"),
    })
}

fn connection(now: &Now) -> Value {
    let (state, error) = bridge(now);
    let (local_state, url, local_error) = local_mcp(now);
    json!({
        "bridge": { "state": state, "mcpUrl": now.mcp_url, "error": error },
        "localMcp": { "state": local_state, "url": url, "error": local_error },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(app: &App, command: &str, args: Value) -> Value {
        let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
        match app.execute(request, CancellationToken::new()).await {
            Response::Done { payload, .. } => payload,
            Response::Failed(error) => error.into(),
        }
    }

    #[tokio::test]
    async fn the_real_state_is_told() {
        let status = Arc::new(Status::default());
        let app = App::new(Arc::clone(&status), Settings::default());
        assert_eq!(run(&app, "app.status", json!({})).await["connectionStatus"], "disabled");
        let refused = run(&app, "app.connection.reconnect", json!({})).await;
        assert_eq!(refused, json!({ "reconnected": false, "error": "The bridge is switched off." }));

        status.set_local_mcp(LocalMcp::Listening(([127, 0, 0, 1], 8765).into()));
        status.set_bridge(Bridge::Waiting("the proxy does not answer".into()));
        status.set_mcp_url(Some("http://p/v1/x/mcp".into()));
        assert_eq!(
            run(&app, "app.connection.status", json!({})).await,
            json!({
                "bridge": {
                    "state": "waiting", "mcpUrl": "http://p/v1/x/mcp", "error": "the proxy does not answer",
                },
                "localMcp": { "state": "listening", "url": "http://127.0.0.1:8765/", "error": null },
            })
        );
        assert_eq!(run(&app, "app.connection.reconnect", json!({})).await, json!({ "reconnected": true }));
        // Somebody hears of it, now or later.
        status.reconnect.notified().await;
    }

    #[tokio::test]
    async fn only_switches_are_told() {
        let mut settings = Settings::default();
        settings.set("NodeTtsEnabled", true).unwrap();
        let app = App::new(Arc::default(), settings);
        let get = async |name| run(&app, "app.settings.get", json!({ "name": name })).await;
        assert_eq!([get("NodeTtsEnabled").await, get("NodeSttEnabled").await], [json!(true), json!(false)]);
        assert_eq!(get("EnableNodeMode").await, Value::Null);
        assert!(get("Token").await["error"].is_string());
        assert_eq!(run(&app, "app.settings.get", json!({})).await.as_object().unwrap().len(), 10);
    }
}
