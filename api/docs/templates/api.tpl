{{- /* The page: a section for each kind, with a table for its spec and one for its status. */ -}}
{{- define "gvList" -}}
# API

Every field of the custom resources, made from the comments in `api/v2alpha1` by `make generate`; `kubectl explain` has them too.
How to use them: [configure.md](configure.md). The parameters in claims are no resource of their own: see
[reference.md](reference.md#claim-parameters).

A value that is not allowed is refused when the object is written, with its field and what is allowed.
{{ range . }}{{ $gv := . }}{{ range reverse .SortedKinds }}{{ template "kind" dict "version" $gv.GroupVersionString "type" ($gv.TypeForKind .) }}{{ end }}{{ end }}
{{- end -}}

{{- define "kind" }}{{ $kind := .type.Name }}{{ $resource := first (index .type.Markers "kubebuilder:resource") }}
## {{ $kind }}

`apiVersion: {{ .version }}`, `kind: {{ $kind }}`, {{ lower $resource.Scope }}-scoped, short `{{ join "`, `" $resource.ShortName }}`.

{{ .type.Doc }}
{{ range index .type.Markers "kubebuilder:validation:XValidation" }}
A rule over several fields: {{ .Message }}.
{{ end }}{{ range .type.Members }}{{ if has .Name (list "spec" "status") }}
### {{ $kind }} {{ .Name }}

{{ .Doc }}

| Field | Type | Default | Allowed | Meaning |
|---|---|---|---|---|
{{ template "rows" dict "path" "" "members" .Type.Members }}{{ end }}{{ end }}
{{- end -}}

{{- /* A row for each field and, with a longer path, for each of the fields of its type. A type that is the spec of a kind has
       a table already. */ -}}
{{- define "rows" -}}
{{- $path := .path -}}
{{- range .members -}}
{{- $array := ternary "[]" "" (hasSuffix " array" (markdownRenderType .Type)) -}}
{{- $ours := hasPrefix "github.com/cilium/networkdriver/" .Type.Package -}}
{{- $kind := trimSuffix "Spec" .Type.Name -}}
| `{{ $path }}{{ .Name }}` | {{ $array }}
{{- if not $ours }}{{ trimSuffix " array" (markdownRenderType .Type) }}
{{- else if ne $kind .Type.Name }}[{{ $kind }} spec](#{{ lower $kind }}-spec)
{{- else }}object{{ end }} | {{ template "default" . }} | {{ template "allowed" .Markers }} | {{ template "text" .Doc }} |
{{ if and $ours (eq $kind .Type.Name) }}{{ template "rows" dict "path" (print $path .Name $array ".") "members" .Type.Members }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "default" -}}
{{- if index .Markers "kubebuilder:default" }}`{{ .Default }}`{{ else if index .Markers "required" }}required{{ end -}}
{{- end -}}

{{- define "allowed" -}}
{{- $all := list -}}
{{- $min := first (index . "kubebuilder:validation:Minimum") -}}
{{- $max := first (index . "kubebuilder:validation:Maximum") -}}
{{- if and (not (kindIs "invalid" $min)) (not (kindIs "invalid" $max)) }}{{ $all = append $all (print $min " to " $max) }}
{{- else if not (kindIs "invalid" $min) }}{{ $all = append $all (print $min " or more") }}{{ end -}}
{{- with index . "kubebuilder:validation:MaxLength" }}{{ $all = append $all (print "at most " (first .) " characters") }}{{ end -}}
{{- range index . "kubebuilder:validation:XValidation" }}{{ $all = append $all .Message }}{{ end -}}
{{- with index . "kubebuilder:validation:MaxItems" }}{{ $all = append $all (print "at most " (first .)) }}{{ end -}}
{{- with index . "listMapKey" }}{{ $all = append $all (print "each with another `" (join "`, `" .) "`") }}{{ end -}}
{{- with index . "listType" }}{{ if eq (toString (first .)) "set" }}{{ $all = append $all "no value twice" }}{{ end }}{{ end -}}
{{- with index . "kubebuilder:validation:items:Enum" }}{{ $all = append $all (print "each `" (join "` or `" (first .)) "`") }}{{ end -}}
{{- with index . "kubebuilder:validation:items:MaxLength" }}{{ $all = append $all (print "each at most " (first .) " characters") }}{{ end -}}
{{- range index . "kubebuilder:validation:items:XValidation" }}{{ $all = append $all (print "each " .Message) }}{{ end -}}
{{- template "text" join "; " $all -}}
{{- end -}}

{{- /* Text in a cell of a table. */ -}}
{{- define "text" }}{{ . | replace "\n" " " | replace "|" "\\|" | replace "<" "&lt;" }}{{ end -}}
