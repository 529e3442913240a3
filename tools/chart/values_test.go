// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package chart

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// valuesTable makes the reference page of the values: a row for each value with its default and its comment.
func valuesTable(values []byte) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(values, &document); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	out.WriteString("# Values of the Helm chart\n\n" +
		"All values of `install/helm/cilium-network-driver`, made from its `values.yaml` by `make golden`.\n" +
		"The chart's schema refuses others, and values of another form, with a message that names them.\n\n" +
		"| Value | Default | Meaning |\n|---|---|---|\n")
	if err := addRows(&out, "", document.Content[0], ""); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// addRows adds a row for each value of a mapping. A mapping with comments in it is a group, another one a value.
func addRows(out *bytes.Buffer, path string, mapping *yaml.Node, above string) error {
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := strings.TrimPrefix(path+"."+key.Value, ".")
		comment := text(key.HeadComment)
		if value.Kind == yaml.MappingNode && commented(value) {
			if err := addRows(out, name, value, strings.TrimSpace(above+" "+comment)); err != nil {
				return err
			}
			continue
		}
		if comment == "" && above == "" {
			return fmt.Errorf("values.yaml: %s has no comment", name)
		}
		var decoded any
		if err := value.Decode(&decoded); err != nil {
			return err
		}
		standard, err := json.Marshal(decoded)
		if err != nil {
			return err
		}
		if comment == "" {
			comment = above
		}
		fmt.Fprintf(out, "| `%s` | `%s` | %s |\n", name, standard, strings.ReplaceAll(comment, "|", "\\|"))
	}
	return nil
}

func commented(mapping *yaml.Node) bool {
	for i := 0; i < len(mapping.Content); i += 2 {
		if mapping.Content[i].HeadComment != "" || mapping.Content[i+1].Kind == yaml.MappingNode && commented(mapping.Content[i+1]) {
			return true
		}
	}
	return false
}

// text joins the lines of a comment. A paragraph before the last is about something else than the value.
func text(comment string) string {
	paragraphs := strings.Split(comment, "\n\n")
	var words []string
	for line := range strings.Lines(paragraphs[len(paragraphs)-1]) {
		words = append(words, strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "#"))...)
	}
	return strings.Join(words, " ")
}
