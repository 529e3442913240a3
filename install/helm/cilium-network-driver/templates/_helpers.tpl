{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Copyright Authors of Cilium */}}

{{/* Whether this render makes objects. A release that must not be refuses here, before anything is made. */}}
{{- define "network-driver.enabled" -}}
{{- include "network-driver.refuse" . -}}
{{- if .Values.networkDriver.enabled -}}true{{- end -}}
{{- end -}}

{{/*
Helm removes what a release had and the new chart lacks: over a release that holds Cilium, that would be the cluster's
network. `lookup` finds nothing in `helm template`, so that Cilium's usual name is refused by itself.
*/}}
{{- define "network-driver.refuse" -}}
{{- $advice := "this chart is a release of its own: helm upgrade --install network-driver <chart> -n kube-system" -}}
{{- if eq .Release.Name "cilium" -}}
{{- fail (printf "release %q: the name is Cilium's own; %s" .Release.Name $advice) -}}
{{- end -}}
{{- range $kind, $names := dict "ConfigMap" (list "cilium-config") "DaemonSet" (list "cilium" "cilium-envoy") "Deployment" (list "cilium-operator" "hubble-relay") -}}
{{- range $name := $names -}}
{{- $object := lookup (ternary "v1" "apps/v1" (eq $kind "ConfigMap")) $kind $.Release.Namespace $name -}}
{{- if $object -}}
{{- if eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" $object) $.Release.Name -}}
{{- fail (printf "release %q in namespace %q holds Cilium (%s %s), which this chart would remove; %s" $.Release.Name $.Release.Namespace $kind $name $advice) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $namespace := uniq (list .Release.Namespace "kube-system") -}}
{{- $config := lookup "v1" "ConfigMap" $namespace "cilium-config" -}}
{{- if and $.Values.networkDriver.enabled (or (eq (dig "data" "enable-network-driver" "" $config) "true") (eq (dig "data" "enable-cilium-network-driver" "" $config) "true")) -}}
{{- fail (printf "Cilium's own network driver is enabled (ConfigMap %s/cilium-config): two drivers cannot share a node; disable one of them" $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Whether agents make their nodes' CiliumNodes. Cilium's operator labels the CRD with the version of its schema. The
namespace is found where `lookup` works at all.
*/}}
{{- define "network-driver.ciliumNodes" -}}
{{- $create := toString .Values.ciliumNodes.create -}}
{{- if not .Values.operator.enabled -}}
{{- else if eq $create "true" -}}
true
{{- else if and (eq $create "auto") (lookup "v1" "Namespace" "" "kube-system") -}}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "ciliumnodes.cilium.io" -}}
{{- if not (dig "metadata" "labels" "io.cilium.k8s.crd.schema.version" "" $crd) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "network-driver.labels" -}}
app.kubernetes.io/name: cilium-network-driver
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: cilium-network-driver
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that find the pods of a component; called with a dict of component and root. */}}
{{- define "network-driver.selector" -}}
app.kubernetes.io/name: cilium-network-driver
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object of a component. */}}
{{- define "network-driver.componentLabels" -}}
{{ include "network-driver.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Reference of a component's image; called with its values and root. */}}
{{- define "network-driver.image" -}}
{{- $registry := .root.Values.image.registry -}}
{{- $name := ternary .image.repository (printf "%s/%s" (trimSuffix "/" $registry) .image.repository) (empty $registry) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .root.Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A container that copies a program to the node before the agent starts. */}}
{{- define "network-driver.installer" -}}
image: {{ include "network-driver.image" (dict "root" . "image" .Values.agent.image) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [/usr/bin/install-cni]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources:
  requests:
    cpu: 10m
    memory: 16Mi
{{- end -}}

{{/* The agent's user name in the API. */}}
{{- define "network-driver.agentUser" -}}
system:serviceaccount:{{ .Release.Namespace }}:{{ .Values.agent.serviceAccount.name }}
{{- end -}}

{{/* The driver's names as a CEL list. */}}
{{- define "network-driver.celDriverNames" -}}
[{{ range $i, $name := .Values.driverNames }}{{ if $i }}, {{ end }}{{ squote $name }}{{ end }}]
{{- end -}}

{{/* A flag's value. Numbers from a file of values are floats, which would be written 1e+06. */}}
{{- define "network-driver.flag" -}}
{{- if kindIs "float64" . -}}{{- if eq . (floor .) -}}{{- int64 . -}}{{- else -}}{{- toString . -}}{{- end -}}{{- else -}}{{- toString . -}}{{- end -}}
{{- end -}}

{{/* The agent's flags as a map of strings. */}}
{{- define "network-driver.agentConfig" -}}
{{- $config := dict
  "enable-network-driver" "true"
  "debug" (toString .Values.debug)
  "log-format" .Values.logFormat
  "kubelet-root-dir" .Values.agent.kubeletRootDir
  "nri-socket-path" .Values.agent.nriSocketPath
  "cdi-spec-dir" .Values.agent.cdiSpecDir
  "nri-plugin-index" .Values.agent.nriPluginIndex
  "sysfs-path" "/host/sys"
  "k8s-client-qps" (include "network-driver.flag" .Values.agent.k8sClient.qps)
  "k8s-client-burst" (include "network-driver.flag" .Values.agent.k8sClient.burst)
-}}
{{- if .Values.agent.gateHook.enabled -}}
{{- $_ := set $config "gate-hook-path" (printf "%s/networkdriver-hook" .Values.agent.gateHook.hostDir) -}}
{{- end -}}
{{- if .Values.agent.prometheus.enabled -}}
{{- $_ := set $config "prometheus-serve-addr" (printf ":%v" .Values.agent.prometheus.port) -}}
{{- end -}}
{{- if include "network-driver.ciliumNodes" . -}}
{{- $_ := set $config "auto-create-cilium-node-resource" "true" -}}
{{- end -}}
{{- range $flag, $value := .Values.agent.extraConfig -}}
{{- $_ := set $config $flag (include "network-driver.flag" $value) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The operator's flags as a map of strings. */}}
{{- define "network-driver.operatorConfig" -}}
{{- $config := dict
  "enable-network-driver" "true"
  "debug" (toString .Values.debug)
  "log-format" .Values.logFormat
  "k8s-namespace" .Release.Namespace
  "operator-api-serve-addr" (printf ":%v" .Values.operator.healthPort)
  "leader-election-lease-duration" .Values.operator.leaderElection.leaseDuration
  "leader-election-renew-deadline" .Values.operator.leaderElection.renewDeadline
  "leader-election-retry-period" .Values.operator.leaderElection.retryPeriod
  "network-driver-refresh-interval" .Values.operator.refreshInterval
  "network-driver-write-qps" (include "network-driver.flag" .Values.operator.writes.qps)
  "network-driver-write-burst" (include "network-driver.flag" .Values.operator.writes.burst)
-}}
{{- if .Values.operator.prometheus.enabled -}}
{{- $_ := set $config "prometheus-serve-addr" (printf ":%v" .Values.operator.prometheus.port) -}}
{{- end -}}
{{- range $flag, $value := .Values.operator.extraConfig -}}
{{- $_ := set $config $flag (include "network-driver.flag" $value) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
The account's token and the API server's certificate, as the API server would mount them into every container of the
pod. Mounted by hand only the container that uses them has them.
*/}}
{{- define "network-driver.tokenVolume" -}}
name: kube-api-access
projected:
  sources:
  - serviceAccountToken:
      path: token
      expirationSeconds: 3607
  - configMap:
      name: kube-root-ca.crt
      items:
      - key: ca.crt
        path: ca.crt
  - downwardAPI:
      items:
      - path: namespace
        fieldRef:
          apiVersion: v1
          fieldPath: metadata.namespace
{{- end -}}

{{- define "network-driver.tokenMount" -}}
name: kube-api-access
mountPath: /var/run/secrets/kubernetes.io/serviceaccount
readOnly: true
{{- end -}}

{{/* Parts that the policies on the agents' writes have in common. */}}
{{- define "network-driver.agentCondition" }}
  matchConditions:
  - name: is-agent
    expression: request.userInfo.username == '{{ include "network-driver.agentUser" . }}'
{{- end }}

{{- define "network-driver.agentNode" }}
  - name: node
    expression: request.userInfo.extra[?'authentication.kubernetes.io/node-name'][0].orValue('')
  - name: present
    expression: 'request.operation == "DELETE" ? oldObject : object'
{{- end }}

{{- define "network-driver.agentBound" }}
  - expression: variables.node != ''
    message: the network driver's agent has to use a token that is bound to its node
{{- end }}
