{{- define "elasticrun.metadata" -}}
name: elasticrun-operator
{{- if .namespace }}
namespace: {{ .namespace }}
{{- end }}
labels:
  app.kubernetes.io/name: elasticrun-operator
{{- end }}

{{- define "elasticrun.account" -}}
- kind: ServiceAccount
  name: elasticrun-operator
  namespace: {{ .Release.Namespace }}
{{- end }}

{{- define "elasticrun.rules" -}}
- {apiGroups: [elasticrun.dev], resources: [elasticjobs], verbs: [get, list, watch, delete]}
- {apiGroups: [elasticrun.dev], resources: [elasticjobs/status], verbs: [patch]}
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch, create, delete]}
- {apiGroups: [""], resources: [services], verbs: [get, create]}
- {apiGroups: [""], resources: [secrets, events], verbs: [create]}
- {apiGroups: [scheduling.volcano.sh], resources: [podgroups], verbs: [get, create]}
- {apiGroups: [scheduling.x-k8s.io], resources: [podgroups], verbs: [get, create]}
- {apiGroups: [scheduling.k8s.io], resources: [podgroups], verbs: [get, create]}
{{- end }}

{{- define "elasticrun.own" -}}
{{- $own := "resourceNames: [elasticrun-operator]" -}}
- {apiGroups: [""], resources: [secrets], {{ $own }}, verbs: [get]}
{{- if gt (int .Values.replicas) 1 }}
- {apiGroups: [coordination.k8s.io], resources: [leases], {{ $own }}, verbs: [get, update]}
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create]}
{{- end }}
{{- end }}
