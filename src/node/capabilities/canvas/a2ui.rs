//! A2UI 0.8: the surfaces that agents describe by messages, without a screen.
//!
//! A *surface* has a flat list of components and a data model that they are bound to. What is kept here is what was
//! pushed plus what the user has entered since; a page of ours shows it and reports what is entered and pressed.

mod data;
mod messages;

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use data::Data;
use messages::Message;
pub(super) use messages::{MAX_BYTES as MAX_PUSH_BYTES, Push};

/// The version of A2UI that is understood.
pub(super) const VERSION: &str = "0.8";
/// The document that shows surfaces. Its policy lets nothing in but pictures, films and sounds.
pub(super) const PAGE: &str = include_str!("a2ui/page.html");
/// The script that draws them. It is added to the document where no other script sees it.
pub(super) const SCRIPT: &str = include_str!("a2ui/page.js");
/// The most surfaces.
const MAX_SURFACES: usize = 64;
/// The most components of a surface.
const MAX_COMPONENTS: usize = 2000;
/// The most bytes that all surfaces may take as JSON.
const MAX_BYTES: usize = 16 << 20;
/// The most bytes of one report of the page.
const MAX_REPORT_BYTES: usize = 64 << 10;
/// The most actions that are kept; the oldest are forgotten.
const MAX_ACTIONS: usize = 100;

/// All surfaces.
#[derive(Debug, Clone, Default)]
pub(super) struct Surfaces {
    surfaces: Vec<Surface>,
    /// What the user has pressed.
    actions: VecDeque<Value>,
    /// What came with the last push that had some.
    props: Option<Value>,
    /// How much they take, at the most.
    bytes: usize,
}

/// A surface, as the page and the dump have it.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Surface {
    surface_id: String,
    /// The component to begin with. Nothing is drawn before it is known.
    root: Option<String>,
    catalog_id: Option<String>,
    styles: Option<Value>,
    #[serde(serialize_with = "values")]
    components: BTreeMap<String, Component>,
    data_model: Data,
}

/// A component of a surface.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Component {
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight: Option<f64>,
    /// One member: its kind, with its properties.
    component: serde_json::Map<String, Value>,
}

fn values<S: Serializer>(components: &BTreeMap<String, Component>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(components.values())
}

/// What the page reports.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Report {
    /// Something was entered.
    #[serde(rename_all = "camelCase")]
    Data { surface_id: String, path: String, value: Value },
    /// A button was pressed.
    UserAction(Value),
}

impl Surfaces {
    /// Applies messages, in their order. After an error nothing may be kept of what it has changed.
    pub(super) fn push(&mut self, push: &Push) -> Result<(), String> {
        for (line, message) in &push.messages {
            self.apply(message).map_err(|error| format!("A2UI line {line}: {error}"))?;
        }
        if push.props.is_some() {
            self.props.clone_from(&push.props);
        }
        let all = serde_json::to_string(&(&self.surfaces, &self.props)).map_err(|error| error.to_string())?;
        self.bytes = all.len();
        if self.bytes > MAX_BYTES {
            return Err(format!("A2UI surfaces take at most {MAX_BYTES} bytes together"));
        }
        Ok(())
    }

    fn apply(&mut self, message: &Message) -> Result<(), String> {
        match message {
            Message::BeginRendering { surface_id, root, catalog_id, styles } => {
                let surface = self.surface(surface_id)?;
                surface.root = Some(root.clone());
                surface.catalog_id.clone_from(catalog_id);
                surface.styles.clone_from(styles);
            }
            Message::SurfaceUpdate { surface_id, components } => {
                let surface = self.surface(surface_id)?;
                for component in components {
                    if component.component.len() != 1 || !component.component.values().all(Value::is_object) {
                        return Err("a component must have one kind, with an object of properties".to_owned());
                    }
                    for properties in component.component.values() {
                        surface.data_model.initialise(properties)?;
                    }
                    surface.components.insert(component.id.clone(), component.clone());
                }
                if surface.components.len() > MAX_COMPONENTS {
                    return Err(format!("a surface has at most {MAX_COMPONENTS} components"));
                }
            }
            Message::DataModelUpdate { surface_id, path, contents } => {
                let entries = Data::from_entries(contents)?;
                self.surface(surface_id)?.data_model.update(path.as_deref().unwrap_or_default(), entries)?;
            }
            Message::DeleteSurface { surface_id } => {
                self.surfaces.retain(|surface| surface.surface_id != *surface_id);
            }
        }
        Ok(())
    }

    /// The surface of this id, which is made if there is none.
    fn surface(&mut self, id: &str) -> Result<&mut Surface, String> {
        let index = match self.surfaces.iter().position(|surface| surface.surface_id == id) {
            Some(index) => index,
            None if self.surfaces.len() == MAX_SURFACES => {
                return Err(format!("there are at most {MAX_SURFACES} surfaces"));
            }
            None => {
                self.surfaces.push(Surface { surface_id: id.to_owned(), ..Surface::default() });
                self.surfaces.len() - 1
            }
        };
        Ok(&mut self.surfaces[index])
    }

    /// Takes over what the page reports. What is too much is left out.
    pub(super) fn heed(&mut self, report: &str) {
        if report.len() > MAX_REPORT_BYTES || self.bytes + report.len() > MAX_BYTES {
            return tracing::debug!("a report of the canvas is too large");
        }
        match serde_json::from_str(report) {
            Ok(Report::Data { surface_id, path, value }) => {
                self.bytes += report.len();
                let surface = self.surfaces.iter_mut().find(|surface| surface.surface_id == surface_id);
                let set = surface.map(|surface| surface.data_model.set(&path, value.into()));
                tracing::trace!(?set, "something was entered in the canvas");
            }
            Ok(Report::UserAction(action)) => {
                if self.actions.len() == MAX_ACTIONS {
                    self.actions.pop_front();
                }
                self.actions.push_back(action);
            }
            Err(_) => tracing::debug!("a report of the canvas makes no sense"),
        }
    }

    /// All that is known.
    pub(super) fn dump(&self) -> Value {
        let mut dump = json!({
            "renderer": "web",
            "a2uiVersion": VERSION,
            "surfaceCount": self.surfaces.len(),
            "surfaces": self.surfaces,
            "userActions": self.actions,
        });
        if let Some(props) = &self.props {
            dump["props"] = props.clone();
        }
        dump
    }

    /// The script that makes the page draw it.
    pub(super) fn for_page(&self) -> String {
        let state = serde_json::to_string(&self.surfaces).unwrap_or_default();
        // As a string, for in an object literal "__proto__" would be more than a name.
        format!("openclawA2ui.show({})", Value::from(state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(surfaces: &mut Surfaces, message: Value) -> Result<(), String> {
        surfaces.push(&Push::parse(&message.to_string(), None)?)
    }

    #[test]
    fn all_surfaces_together_are_bounded() {
        let large = "x".repeat(messages::MAX_BYTES - 1000);
        let begin = |id: &str| {
            let (surface_id, root, styles) = (id.to_owned(), "r".to_owned(), Some(json!({ "font": large })));
            (1, Message::BeginRendering { surface_id, root, catalog_id: None, styles })
        };
        let mut surfaces = Surfaces::default();
        let mut push =
            |ids: &[&str]| surfaces.push(&Push { messages: ids.iter().map(|id| begin(id)).collect(), props: None });
        assert_eq!(push(&["a", "b", "c", "d"]), Ok(()));
        assert_eq!(push(&["e"]).unwrap_err(), "A2UI surfaces take at most 16777216 bytes together");
    }

    #[test]
    fn reports_are_taken_over_within_bounds() {
        let mut surfaces = Surfaces::default();
        push(&mut surfaces, json!({ "beginRendering": { "surfaceId": "a", "root": "r" } })).unwrap();
        let mut heed = |report: Value| surfaces.heed(&report.to_string());
        let entered =
            |id: &str, path: &str, value: &str| json!({ "data": { "surfaceId": id, "path": path, "value": value } });
        heed(entered("a", "/name", "Ada"));
        heed(entered("unknown", "/name", "Bob"));
        heed(entered("a", "/", "the root is a map"));
        heed(entered("a", "/long", &"x".repeat(MAX_REPORT_BYTES)));
        heed(json!({ "other": 1 }));
        for index in 0..=MAX_ACTIONS {
            heed(json!({ "userAction": { "name": index } }));
        }
        let dump = surfaces.dump();
        assert_eq!(dump["surfaces"][0]["dataModel"], json!({ "name": "Ada" }));
        let actions = dump["userActions"].as_array().unwrap();
        assert_eq!((actions.len(), &actions[0]["name"]), (MAX_ACTIONS, &json!(1)));
    }
}
