//! A surface's data model: JSON whose maps keep their order, for a list may be drawn from a map.

use serde::{Serialize, Serializer};
use serde_json::{Number, Value};

/// The most elements of one map or list. Maps are searched one by one.
const MAX_ENTRIES: usize = 1024;
/// How deep data may be nested.
const MAX_DEPTH: usize = 32;

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Data {
    /// Nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Data>),
    /// A map.
    Map(Vec<(String, Data)>),
}

impl Default for Data {
    fn default() -> Self {
        Data::Map(Vec::new())
    }
}

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Data::Null => serializer.serialize_unit(),
            Data::Bool(value) => value.serialize(serializer),
            Data::Number(value) => value.serialize(serializer),
            Data::Text(value) => value.serialize(serializer),
            Data::List(values) => serializer.collect_seq(values),
            Data::Map(entries) => serializer.collect_map(entries.iter().map(|(key, value)| (key, value))),
        }
    }
}

impl From<Value> for Data {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Data::Null,
            Value::Bool(value) => Data::Bool(value),
            Value::Number(value) => Data::Number(value),
            Value::String(value) => Data::Text(value),
            Value::Array(values) => Data::List(values.into_iter().map(Data::from).collect()),
            Value::Object(entries) => Data::Map(entries.into_iter().map(|(key, value)| (key, value.into())).collect()),
        }
    }
}

impl Data {
    /// The map that a message's list of entries describes.
    pub(super) fn from_entries(entries: &[Value]) -> Result<Self, String> {
        Self::map(entries, 1)
    }

    fn map(entries: &[Value], depth: usize) -> Result<Self, String> {
        let mut map = Data::default();
        check(entries.len(), depth)?;
        for entry in entries {
            let key = entry.get("key").and_then(Value::as_str).ok_or("an entry of data needs a key")?;
            map.insert(key, Self::from_entry(entry, depth)?)?;
        }
        Ok(map)
    }

    fn from_entry(entry: &Value, depth: usize) -> Result<Self, String> {
        let wrong = || "an entry of data needs one value of its type".to_owned();
        let entry = entry.as_object().ok_or_else(wrong)?;
        let mut values = entry.iter().filter(|(name, _)| name.starts_with("value"));
        let (Some((name, value)), None) = (values.next(), values.next()) else { return Err(wrong()) };
        match (&**name, value) {
            ("valueString", Value::String(text)) => Ok(Data::Text(text.clone())),
            ("valueNumber", Value::Number(number)) => Ok(Data::Number(number.clone())),
            ("valueBoolean", Value::Bool(value)) => Ok(Data::Bool(*value)),
            ("valueMap", Value::Array(entries)) => Self::map(entries, depth + 1),
            ("valueArray", Value::Array(elements)) => {
                check(elements.len(), depth + 1)?;
                let elements = elements.iter().map(|element| Self::from_entry(element, depth + 1));
                Ok(Data::List(elements.collect::<Result<_, _>>()?))
            }
            _ => Err(wrong()),
        }
    }

    /// Applies a message: at the root it takes the place of all data, and elsewhere of the members that it names. A
    /// lone member called `.` is the value itself.
    pub(super) fn update(&mut self, path: &str, contents: Data) -> Result<(), String> {
        let Data::Map(mut entries) = contents else { return self.set(path, contents) };
        if segments(path).next().is_none() {
            *self = Data::Map(entries);
            return Ok(());
        }
        if let [(key, _)] = &*entries
            && key == "."
            && let Some((_, value)) = entries.pop()
        {
            return self.set(path, value);
        }
        let place = self.place(path)?;
        if !matches!(place, Data::Map(_)) {
            *place = Data::default();
        }
        for (key, value) in entries {
            place.insert(&key, value)?;
        }
        Ok(())
    }

    /// Puts a value at a path, whose missing members become maps.
    pub(super) fn set(&mut self, path: &str, value: Data) -> Result<(), String> {
        if segments(path).next().is_none() && !matches!(value, Data::Map(_)) {
            return Err("the root of the data must be a map".to_owned());
        }
        *self.place(path)? = value;
        Ok(())
    }

    fn place(&mut self, path: &str) -> Result<&mut Data, String> {
        check(0, segments(path).count())?;
        let mut place = self;
        for segment in segments(path) {
            if !matches!(place, Data::Map(_) | Data::List(_)) {
                *place = Data::default();
            }
            place = match place {
                Data::List(values) => {
                    let index: Option<usize> = segment.parse().ok();
                    index.and_then(|index| values.get_mut(index)).ok_or("a path leads beyond a list of data")?
                }
                map => map.insert_with(segment, None)?,
            };
        }
        Ok(place)
    }

    fn insert(&mut self, key: &str, value: Data) -> Result<(), String> {
        self.insert_with(key, Some(value)).map(|_| ())
    }

    /// The member of a map, with a new value if one is given, and with none if it was not there.
    fn insert_with(&mut self, key: &str, value: Option<Data>) -> Result<&mut Data, String> {
        let Data::Map(entries) = self else { return Err("a path leads through what is no map".to_owned()) };
        let index = match entries.iter().position(|(name, _)| name == key) {
            Some(index) => index,
            None => {
                check(entries.len() + 1, 0)?;
                entries.push((key.to_owned(), Data::Null));
                entries.len() - 1
            }
        };
        let member = &mut entries[index].1;
        if let Some(value) = value {
            *member = value;
        }
        Ok(member)
    }

    /// Takes over the values that a component's properties begin with: those that have both a literal and a path. A
    /// path that depends on where the component is drawn is left to the page.
    pub(super) fn initialise(&mut self, properties: &Value) -> Result<(), String> {
        match properties {
            Value::Object(members) => {
                let path = members.get("path").and_then(Value::as_str).filter(|path| path.starts_with('/'));
                let literal = members.iter().find(|(name, _)| name.starts_with("literal"));
                if let (Some(path), Some((_, value))) = (path, literal) {
                    return self.set(path, value.clone().into());
                }
                members.values().try_for_each(|member| self.initialise(member))
            }
            Value::Array(elements) => elements.iter().try_for_each(|element| self.initialise(element)),
            _ => Ok(()),
        }
    }
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

fn check(entries: usize, depth: usize) -> Result<(), String> {
    if entries > MAX_ENTRIES {
        return Err(format!("a map or list of data has at most {MAX_ENTRIES} elements"));
    }
    if depth > MAX_DEPTH {
        return Err(format!("data is nested at most {MAX_DEPTH} deep"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn update(data: &mut Data, path: &str, entries: Value) -> Result<(), String> {
        data.update(path, Data::from_entries(entries.as_array().unwrap())?)
    }

    fn text(data: &Data) -> String {
        serde_json::to_string(data).unwrap()
    }

    #[test]
    fn entries_become_maps_in_their_order() {
        let mut data = Data::default();
        let entries = json!([
            { "key": "z", "valueString": "1" },
            { "key": "a", "valueMap": [{ "key": "y", "valueNumber": 2.5 }, { "key": "b", "valueBoolean": true }] },
            { "key": "l", "valueArray": [{ "valueString": "x" }] },
        ]);
        update(&mut data, "/", entries).unwrap();
        assert_eq!(text(&data), r#"{"z":"1","a":{"y":2.5,"b":true},"l":["x"]}"#);
        update(&mut data, "a", json!([{ "key": "b", "valueBoolean": false }])).unwrap();
        assert_eq!(text(&data), r#"{"z":"1","a":{"y":2.5,"b":false},"l":["x"]}"#);
        update(&mut data, "/l/0", json!([{ "key": ".", "valueNumber": 7 }])).unwrap();
        update(&mut data, "/z/deep", json!([{ "key": "k", "valueString": "v" }])).unwrap();
        assert_eq!(text(&data), r#"{"z":{"deep":{"k":"v"}},"a":{"y":2.5,"b":false},"l":[7]}"#);
        update(&mut data, "", json!([])).unwrap();
        assert_eq!(text(&data), "{}");
    }

    #[test]
    fn what_is_no_data_is_refused() {
        for entries in [
            json!([{ "valueString": "no key" }]),
            json!([{ "key": "no value" }]),
            json!([{ "key": "two", "valueString": "a", "valueNumber": 1 }]),
            json!([{ "key": "k", "valueString": 1 }]),
            json!(["k"]),
        ] {
            assert!(update(&mut Data::default(), "/", entries).is_err());
        }
        let mut data = Data::default();
        assert!(data.set("/", Data::Bool(true)).is_err());
        data.set("/l", json!([1]).into()).unwrap();
        assert!(data.set("/l/1", Data::Null).is_err() && data.set("/l/x", Data::Null).is_err());
    }

    #[test]
    fn data_is_bounded_in_breadth_and_depth() {
        let entries = |count: usize| -> Value {
            (0..count).map(|index| json!({ "key": index.to_string(), "valueNumber": index })).collect()
        };
        let mut data = Data::default();
        update(&mut data, "/", entries(MAX_ENTRIES)).unwrap();
        assert!(data.set("/one-more", Data::Null).is_err());
        assert!(update(&mut data, "/", entries(MAX_ENTRIES + 1)).is_err());
        assert!(data.set(&"/d".repeat(MAX_DEPTH), Data::Null).is_err(), "the map is full");
        let mut data = Data::default();
        assert!(data.set(&"/d".repeat(MAX_DEPTH), Data::Null).is_ok());
        assert!(data.set(&"/d".repeat(MAX_DEPTH + 1), Data::Null).is_err());
        let nested = |depth: usize| {
            (1..depth)
                .fold(json!([{ "key": "k", "valueNumber": 1 }]), |inner, _| json!([{ "key": "k", "valueMap": inner }]))
        };
        assert!(update(&mut Data::default(), "/", nested(MAX_DEPTH)).is_ok());
        assert!(update(&mut Data::default(), "/", nested(MAX_DEPTH + 1)).is_err());
    }

    #[test]
    fn a_literal_with_a_path_is_where_the_data_begins() {
        let mut data = Data::default();
        let properties = json!({
            "text": { "path": "/name", "literalString": "Guest" },
            "options": [{ "label": { "path": "/a/b", "literalNumber": 1 } }],
            "relative": { "path": "name", "literalString": "each its own" },
            "bound": { "path": "/elsewhere" },
        });
        data.initialise(&properties).unwrap();
        assert_eq!(data, json!({ "name": "Guest", "a": { "b": 1 } }).into());
    }
}
